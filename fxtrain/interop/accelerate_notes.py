"""What to use in place of libraries that Accelerate configs name."""

__all__ = ["FP8", "IPEX", "MSAMP"]

FP8 = "plans have no fp8; bf16 is used instead"
MSAMP = (
    "MS-AMP is no longer maintained; bf16 is used instead. For 8-bit optimizer states, pass "
    "torchao.optim.AdamWFp8 or AdamW8bit as the optimizer"
)
IPEX = (
    "IPEX is archived and fails with current torch. Use torch itself: its CPU and XPU backends, "
    "plan.precision = 'bf16' and plan.compile"
)
