# What training code needs to read a store: five packages, no torch, no Ray.
FROM python:3.11-slim-bookworm
WORKDIR /scenecache
COPY pyproject.toml README.md LICENSE ./
COPY extractors/LICENSE.GPL-3.0 extractors/
COPY storage storage
RUN pip install --no-cache-dir -e .
