"""Context parallelism: each rank packs one part of a long history; attention over all parts is merged in each step.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

import torch
import torch.distributed as dist

from turboquant import ops

BATCH, KV_HEADS, QUERY_HEADS, TOKENS, STEPS, HEAD_DIM = 2, 4, 16, 3000, 3, 64


def merged(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Merges attention over each rank's part into that over all parts: out [..., head_dim], lse float32 [...]. A part
    that holds no token has the lse -inf and counts for nothing."""
    outs = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    lses = [torch.empty_like(lse) for _ in outs]
    dist.all_gather(outs, out.contiguous())
    dist.all_gather(lses, lse.contiguous())
    return ops.merge(torch.stack(outs), torch.stack(lses))[0]


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # in a model each rank would compute the keys and values of its part alone
    k, v = torch.randn(2, BATCH, KV_HEADS, TOKENS + STEPS, HEAD_DIM)
    queries = torch.randn(STEPS, BATCH, QUERY_HEADS, 1, HEAD_DIM)

    # The history is cut at multiples of 128 tokens, a page, so that no page is part-filled but the last. The last rank
    # has the end of it, and gets the new tokens.
    part = -(-TOKENS // (128 * ranks)) * 128
    start, last = min(rank * part, TOKENS), rank == ranks - 1
    stop = TOKENS if last else min(start + part, TOKENS)
    packed = ops.pack(k[:, :, start:stop], v[:, :, start:stop], bits=4, max_tokens=stop - start + STEPS)
    if rank == 0:
        print(f"{ranks} ranks, the first with {len(packed):,} of {TOKENS:,} tokens in {packed.nbytes:,} bytes")

    whole = ops.pack(k[:, :, :TOKENS], v[:, :, :TOKENS], bits=4, max_tokens=TOKENS + STEPS)  # to compare with
    for step in range(STEPS):
        new = slice(TOKENS + step, TOKENS + step + 1)
        if last:
            ops.append(packed, k[:, :, new], v[:, :, new])
        # The query comes after every token of every part: it sees all of them.
        out, lse = ops.attend(queries[step], packed, causal=False, return_lse=True)
        out = merged(out, lse)

        ops.append(whole, k[:, :, new], v[:, :, new])
        want = ops.attend(queries[step], whole)
        off = (out - want).abs().max().item()
        if rank == 0:
            print(f"step {step}: {off:.1e} off a cache on one rank")
        assert off < 1e-5, off
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
