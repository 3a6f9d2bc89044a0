"""The operators of turboquant-attention: attention over a packed KV cache. Nothing else of the package is here.

    plan = kernel.Plan(head_dim=128, key=4, value=4)
    pages = kernel.quantize(plan.words, k, v)                     # [batch * pages, kv_heads, record_bytes]
    out, lse = kernel.attend(plan.words, q, pages, block_table, lengths)

The operators are those of `torch.ops.turboquant` in the package, whose documentation says what each argument is. They
have no gradient, and no kernels for tracing: `torch.compile` and `torch.export` cannot look into them.
"""

from ._core import operators as _operators
from .plan import Plan, Side

append, append_attend, append_kernel = _operators.append, _operators.append_attend, _operators.append_kernel
attend, attend_kernel, attend_workspace = _operators.attend, _operators.attend_kernel, _operators.attend_workspace
quantize, dequantize, recode = _operators.quantize, _operators.dequantize, _operators.recode
merge, rotate, schedule = _operators.merge, _operators.rotate, _operators.schedule

__all__ = [
    "Plan",
    "Side",
    "append",
    "append_attend",
    "append_kernel",
    "attend",
    "attend_kernel",
    "attend_workspace",
    "dequantize",
    "merge",
    "quantize",
    "recode",
    "rotate",
    "schedule",
]
