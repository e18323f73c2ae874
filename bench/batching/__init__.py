"""What paging, continuous batching and chunked prefill each add, on the real engine.

engine.py   one loaded model, stepped under several schedulers in turn
ways.py     the ways to serve the same requests, and what is measured of each
report.py   rounds, the table, JSON
"""
