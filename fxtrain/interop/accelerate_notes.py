"""What to use in place of libraries that Accelerate configs name."""

__all__ = ["FP8", "IPEX", "MSAMP"]

FP8 = (
    "used with mixed_precision: fp8 and the backend that has this setting only; see fx.Float8 and "
    "fx.TE. DeepSpeed computes in bf16 instead"
)
MSAMP = (
    "MS-AMP is no longer maintained; torchao's float8 (fx.Float8) is used instead, which keeps "
    "weights and optimizer states in their own dtypes. For 8-bit optimizer states, pass "
    "torchao.optim.AdamWFp8 or AdamW8bit as the optimizer"
)
IPEX = (
    "IPEX is archived and fails with current torch. Use torch itself: its CPU and XPU backends, "
    "plan.precision = 'bf16' and plan.compile"
)
