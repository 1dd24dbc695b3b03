"""What `bench_attention.py` is made of: batches of named cases, who attends them, and what that takes and how well."""
