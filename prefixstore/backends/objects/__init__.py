"""Rows in object storage: S3 and what speaks its protocol."""
