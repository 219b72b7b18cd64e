"""Trains the bundled model and its draft model: `python -m cluster.demo.train [--output DIR] [--evaluate]`.

From a fixed seed, on the corpus of `corpus.py`, on the CPU.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.demo import corpus, vocabulary
from cluster.demo.corpus import Document
from router.chat import render_chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_steps: int
    peak_lr: float
    seed: int = 1


def texts(documents):
    for d in documents:
        yield d if isinstance(d, str) else render_chat(vocabulary.CHAT_TEMPLATE, d, False)


def pack(token_ids, length):
    rows, row = [], []
    for ids in token_ids:
        row += ids
        if len(row) >= length:
            rows.append(row[:length]); row = []
    return torch.tensor(rows)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--muon", type=float, default=0)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--steps", type=int, default=600)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--shape", default="256,512,6,4,2")
    p.add_argument("--out", default="/tmp/demo_x")
    a = p.parse_args()
    t0 = time.time()
    docs = list(corpus.documents())
    tx = list(texts(docs))
    tok = vocabulary.train_tokenizer(tx)
    print("vocab", tok.get_vocab_size(), time.time() - t0)
    ids = [e.ids + [0] for e in tok.encode_batch(tx, add_special_tokens=False)]
    ids = [i if i[0] == 1 else [1, *i] for i in ids]
    n = sum(map(len, ids)); print("tokens", n, n / len(ids), max(map(len, ids)), time.time() - t0)
    random.Random(0).shuffle(ids)
    torch.manual_seed(1); torch.set_num_threads(2)
    h, i, l, nh, kv = map(int, a.shape.split(","))
    cfg = LlamaConfig(vocab_size=1024, hidden_size=h, intermediate_size=i, num_hidden_layers=l, num_attention_heads=nh,
        num_key_value_heads=kv, tie_word_embeddings=True, max_position_embeddings=2048, bos_token_id=1, eos_token_id=[0, 2], pad_token_id=0)
    m = LlamaForCausalLM(cfg)
    print(sum(x.numel() for x in m.parameters()))
    mats = [x for k, x in m.named_parameters() if x.ndim == 2 and "embed" not in k]
    rest = [x for k, x in m.named_parameters() if x.ndim < 2 or "embed" in k]
    if a.muon:
        opts = [torch.optim.Muon(mats, lr=a.muon, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest, lr=a.lr, betas=(0.9, 0.95), weight_decay=0, fused=True)]
    else:
        opts = [torch.optim.AdamW(mats + rest, lr=a.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)]
    base = [o.param_groups[0]["lr"] for o in opts]
    long_from = int(a.steps * 0.9)
    short = pack(ids, 256); long = pack(ids[::-1], 512)
    print(short.shape, long.shape)
    t1 = time.time(); s = 0
    for step in range(a.steps):
        f = min((step + 1) / 40, (a.steps - step) / (a.steps - 40))
        for o, b in zip(opts, base): o.param_groups[0]["lr"] = b * f
        if step < long_from: x = short[(step * a.batch + torch.arange(a.batch)) % len(short)]
        else: x = long[((step - long_from) * (a.batch // 2) + torch.arange(a.batch // 2)) % len(long)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        for o in opts: o.step(); o.zero_grad()
        s += loss.item()
        if step % 50 == 49: print(step + 1, round(s / 50, 4), round(time.time() - t1, 1), flush=True); s = 0
    m.eval()
    def gen(prompts, n=24):
        out = []
        for q in prompts:
            e = torch.tensor([tok.encode(q).ids])
            with torch.no_grad(): g = m.generate(e, max_new_tokens=n, do_sample=False)
            out.append(tok.decode(g[0, e.shape[1]:].tolist(), skip_special_tokens=False))
        return out
    from cluster.demo.facts import COUNTRIES
    for f in ("The capital of {} is", "What is the capital of {}?", "The capital city of {} is"):
        r = gen([f.format(c.name) for c in COUNTRIES]); print(f, sum(c.capital in y for c, y in zip(COUNTRIES, r)), r[:3])
    r = gen([f"The currency of {c.name} is the" for c in COUNTRIES]); print(sum(c.currency in y for c, y in zip(COUNTRIES, r)))
    q = [(x, y) for x in range(40) for y in range(40) if x + y < 40]; q = random.Random(5).sample(q, 150)
    r = gen([f"{x} + {y} =" for x, y in q], 6); print("sums", sum(z.startswith(f" {x+y}.") for (x, y), z in zip(q, r)) / len(q), r[:5])
    for z in gen(["Once upon a time", "Count from 1 to 100.\n", "What is 7 plus 5?", "The day after Monday is"], 400): print(repr(z))
    print(time.time() - t0)


main()
