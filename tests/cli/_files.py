"""A launch file that tests read."""

GOOD = """
[launch]
ranks = 8

[plan]
precision = "bf16"
accumulate = 4
data = { source = "dispatch" }
strategy = { kind = "ddp", bucket_mib = 50.0 }
"""
