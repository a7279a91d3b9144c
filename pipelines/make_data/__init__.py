"""Small synthetic datasets in official on-disk layouts: one file per layout, each with `make(out, seed, ...)`."""
