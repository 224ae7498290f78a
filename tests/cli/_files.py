"""A launch file that tests read."""

GOOD = """
default = "big"

[launch]
ranks = 2

[plan]
precision = "bf16"
data = { source = "dispatch" }
strategy = { kind = "ddp", bucket_mib = 50.0 }

[profiles.big.launch]
ranks = 8

[profiles.big.plan]
accumulate = 4

[profiles.small.plan]
strategy = { kind = "single" }
"""
