"""Model files: checked, lazy readers. A file is data: every offset, count and length is checked against its size."""
