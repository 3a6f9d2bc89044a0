"""Attention over a packed KV cache with plain tensors: python examples/attend.py

Two lines of preparation, one call; beside it PyTorch's own attention over the same tensors, and the bytes of both.
"""

import torch
import torch.nn.functional as F

from turboquant import ops  # makes torch.ops.turboquant
from turboquant.plan import plan_words

torch.manual_seed(0)
batch, kv_heads, query_heads, tokens, head_dim = 2, 4, 16, 1000, 128
k, v = (torch.randn(batch, kv_heads, tokens, head_dim, dtype=torch.bfloat16) for _ in range(2))
q = torch.randn(batch, query_heads, 1, head_dim, dtype=torch.bfloat16)


def compare(out: torch.Tensor, exact: torch.Tensor) -> str:
    return f"cosine {F.cosine_similarity(out.float().flatten(), exact.float().flatten(), dim=0):.4f}"


exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
print(f"bfloat16  {k.nbytes + v.nbytes:9,} bytes")
for bits in (5, 4, 3, 2):
    plan = plan_words(head_dim, key_bits=bits, value_bits=bits)
    packed = ops.pack(k, v, plan)  # pages, block table, lengths and the plan again
    out, lse = torch.ops.turboquant.attend(q, *packed)
    print(f"{bits} bits    {packed[0].nbytes:9,} bytes  {compare(out, exact)} with scaled_dot_product_attention")

# Decoding: a cache with room to grow, stored piece by piece. append works in place, attend reads what is there.
plan = plan_words(head_dim, key_bits=4, value_bits=4)
cache = ops.pack(k[:, :, :0], v[:, :, :0], plan, max_tokens=tokens)
pages, block_table, lengths, _ = cache
for start in range(0, tokens, 250):
    new = slice(start, start + 250)
    lengths += 250
    torch.ops.turboquant.append(k[:, :, new], v[:, :, new], lengths, pages, block_table, plan)
out, lse = torch.ops.turboquant.attend(q, *cache)
print(f"appended, 4 bits: the bytes are the same: {torch.equal(pages, ops.pack(k, v, plan)[0])}, {compare(out, exact)}")
