"""Question-answering heads, which read a store like any other user of it. There are none yet."""
