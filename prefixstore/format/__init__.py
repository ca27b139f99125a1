"""What the bytes at rest are. Pure: nothing here opens a file."""
