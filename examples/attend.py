"""Attention over a packed KV cache with plain tensors: python examples/attend.py

It compares the result and the bytes with those of PyTorch's own attention over the same tensors.
"""

import torch
import torch.nn.functional as F

from turboquant import ops

torch.manual_seed(0)
batch, kv_heads, query_heads, tokens, head_dim = 2, 4, 16, 1000, 128
k, v = (torch.randn(batch, kv_heads, tokens, head_dim, dtype=torch.bfloat16) for _ in range(2))
q = torch.randn(batch, query_heads, 1, head_dim, dtype=torch.bfloat16)


def compare(out: torch.Tensor, exact: torch.Tensor) -> str:
    return f"cosine {F.cosine_similarity(out.float().flatten(), exact.float().flatten(), dim=0):.4f}"


exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
print(f"bfloat16  {k.nbytes + v.nbytes:9,} bytes")
for bits in (5, 4, 3, 2):
    packed = ops.pack(k, v, bits=bits)
    out = ops.attend(q, packed)
    print(f"{bits} bits    {packed.nbytes:9,} bytes  {compare(out, exact)} with scaled_dot_product_attention")

# Decoding: a cache with room to grow, stored piece by piece. append works in place, attend reads what is there.
whole = ops.pack(k, v, bits=4)
packed = ops.pack(k[:, :, :0], v[:, :, :0], whole.plan, max_tokens=tokens)
for start in range(0, tokens, 250):
    ops.append(packed, k[:, :, start : start + 250], v[:, :, start : start + 250])
print(packed)
out, lse = ops.attend(q, packed, return_lse=True)
print(f"appended, 4 bits: the bytes are the same: {torch.equal(packed.pages, whole.pages)}, {compare(out, exact)}")

# The operator below it has every tensor as an argument of its own, for engines that manage pages themselves.
raw, _ = torch.ops.turboquant.attend(packed.plan.words, q, packed.pages, packed.block_table, packed.lengths)
print(f"torch.ops.turboquant.attend: the output is the same: {torch.equal(raw, out)}")
