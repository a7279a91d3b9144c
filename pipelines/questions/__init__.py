"""Question tables: one file per question set."""
