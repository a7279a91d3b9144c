"""Datasets on disk as items: one file per dataset, and the readers of file formats that they share."""
