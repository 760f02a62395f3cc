"""Turns ferris into ferris-relu: warm start, then training under a sparsity controller.

Needs `docs.json` (extract.py), `tokenizer.json` and `val_docs.json` beside it.
Environment: FERRIS (folder of the checkpoint), NT threads, BUDGET seconds.
Resumes from `ckpt.pt`, which is written every 250 steps.
"""
import math
import os
import random
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from data import EOT, T, Data, arithmetic, needle
from model import E, HD, H, I, K, L, NH, NKV, V, Model

torch.set_num_threads(int(os.environ.get('NT', '1')))
torch.manual_seed(7)
BUDGET = float(os.environ.get('BUDGET', '3300'))
FERRIS = os.environ.get('FERRIS', '../../ferris')
START, B, LR, TARGET = .68, 8, float(os.environ.get('LR', '1e-3')), float(os.environ.get('TARGET', '0.82'))


@torch.no_grad()
def warm_start(m, data):
    """Copies ferris; folds q/k norms into the projections; fits the routers.

    A q/k norm divides by each head's rms, which has no place here: its mean over
    real text goes into the projection. Ferris's router reads the normed stream
    after attention; least squares over the same text finds the weights that give
    its log-probabilities from the stream in front of attention (sigmoid of a
    small log-probability is nearly the probability).
    """
    sd = {k.removeprefix('model.'): v.float() for k, v in load_file(f'{FERRIS}/model.safetensors').items()}
    rng = random.Random(5)
    ids = torch.stack([data.sample(rng)[0][:T] for _ in range(64)])
    m.embed_tokens.weight.copy_(sd['embed_tokens.weight'])
    m.norm.weight.copy_(sd['norm.weight'])
    # walk ferris itself over the text, one layer after the other
    inv = 1 / (10000.0 ** (torch.arange(0, HD, 2).float() / HD))
    ang = torch.outer(torch.arange(T).float(), inv)
    ang = torch.cat([ang, ang], -1)
    cos, sin = ang.cos(), ang.sin()
    turn = lambda z: torch.cat([-z[..., HD // 2:], z[..., :HD // 2]], -1)
    rms = lambda z: z.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    x = sd['embed_tokens.weight'][ids]
    for l, layer in enumerate(m.layers):
        p = f'layers.{l}.'
        for name in ('input_layernorm', 'post_attention_layernorm'):
            getattr(layer, name).weight.copy_(sd[p + name + '.weight'])
        a = layer.self_attn
        n = x / rms(x) * sd[p + 'input_layernorm.weight']
        heads = {}
        for c, count in (('q', NH), ('k', NKV), ('v', NKV)):
            w = sd[f'{p}self_attn.{c}_proj.weight']
            z = F.linear(n, w).view(len(ids), T, count, HD)
            if c != 'v':
                size = rms(z)
                fold = sd[f'{p}self_attn.{c}_norm.weight'] / size.mean((0, 1))        # [count, HD]
                w, z = w * fold.reshape(-1, 1), z / size * sd[f'{p}self_attn.{c}_norm.weight']
            getattr(a, f'{c}_proj').weight.copy_(w)
            z = z.transpose(1, 2)
            heads[c] = z if c == 'v' else z * cos + turn(z) * sin
        a.o_proj.weight.copy_(sd[p + 'self_attn.o_proj.weight'])
        k, v = (heads[c].repeat_interleave(NH // NKV, 1) for c in 'kv')
        y = F.scaled_dot_product_attention(heads['q'], k, v, is_causal=True)
        h = x + F.linear(y.transpose(1, 2).reshape(len(ids), T, -1), a.o_proj.weight)
        n = (h / rms(h) * sd[p + 'post_attention_layernorm.weight']).view(-1, H)
        logp = F.linear(n, sd[p + 'mlp.gate.weight']).log_softmax(-1)
        flat = x.reshape(-1, H)
        gram = flat.T @ flat
        gram += 1e-4 * gram.diagonal().mean() * torch.eye(H)
        fit = torch.linalg.solve(gram, flat.T @ logp).T
        layer.mlp.gate.weight.copy_(fit)
        want = logp.topk(K, -1).indices
        got = F.linear(flat, fit).topk(K, -1).indices
        agree = (want[:, :, None] == got[:, None]).any(-1).float().mean()
        print(f'layer {l}: fitted router chooses {agree:.2f} of the same experts', flush=True)
        w, e = logp.exp().topk(K, -1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(n)
        for j in range(E):
            q = f'{p}mlp.experts.{j}.'
            g, u, d = (sd[q + c + '_proj.weight'] for c in ('gate', 'up', 'down'))
            layer.mlp.gu[j].copy_(torch.cat([g, u]))
            layer.mlp.dn[j].copy_(d)
            row, slot = (e == j).nonzero(as_tuple=True)
            r = n[row]
            out.index_add_(0, row, F.linear(F.silu(F.linear(r, g)) * F.linear(r, u), d) * w[row, slot, None])
        x = h + out.view_as(h)


@torch.no_grad()
def evaluate(m, data):
    """Held-out loss, retrieval and sums (shares), busiest expert and zeros of each layer."""
    m.eval()
    losses, load, live = [], torch.zeros(L, E), torch.zeros(L)
    rows = 0
    for o in range(0, min(len(data.val_ids) - T - 1, T * 24), T):
        logits, stats = m(data.val_ids[o:o + T][None])
        losses.append(F.cross_entropy(logits[0].float(), data.val_ids[o + 1:o + T + 1]).item())
        rows += T * K * I
        for i, s in enumerate(stats):
            load[i] += s['load']
            live[i] += s['live'].sum()

    def right(pair):
        a, b = data.enc(pair[0]), data.enc(pair[1])
        logits, _ = m(torch.tensor([[EOT] + a + b])[:, :-1])
        return logits[0, len(a):].argmax(-1).tolist() == b

    rng = random.Random(99)
    found = sum(right(needle(rng, rng.choice(data.val)[:rng.choice([100, 400, 900])], rng.choice([1, 2, 3])))
                for _ in range(40)) / 40
    sums = sum(right(arithmetic(rng)) for _ in range(20)) / 20
    m.train()
    zeros = [round(1 - z, 3) for z in (live / rows).tolist()]
    skew = [round(z, 2) for z in (load.amax(1) / load.mean(1)).tolist()]
    loss = sum(losses) / len(losses)
    return f'loss {loss:.4f} ppl {math.exp(loss):.2f} needle {found} sums {sums} skew {skew} zeros {zeros}'


def main():
    data = Data()
    m = Model()
    rng = random.Random(3)
    decay = [p for p in m.parameters() if p.dim() >= 2]
    flat = [p for p in m.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW([{'params': decay, 'weight_decay': .05}, {'params': flat, 'weight_decay': 0.}],
                            lr=LR, betas=(.9, .95), fused=True)
    start, used, push = 0, 0.0, torch.full((L,), 3e-3)
    if os.path.exists('ckpt.pt'):
        ck = torch.load('ckpt.pt')
        m.load_state_dict(ck['m'])
        opt.load_state_dict(ck['o'])
        start, used, push = ck['step'], ck['used'], ck['push']
        rng.seed(start)
    else:
        warm_start(m, data)
        print('START', evaluate(m, data), flush=True)
    seen = torch.full((L,), 0.5)
    t0, step = time.time(), start

    def save():
        torch.save({'m': m.state_dict(), 'o': opt.state_dict(), 'step': step, 'push': push,
                    'used': used + time.time() - t0}, 'ckpt.new')
        os.replace('ckpt.new', 'ckpt.pt')

    while (done := (time.time() - t0 + used) / BUDGET) < 1:
        lr = LR * min(1, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for g in opt.param_groups:
            g['lr'] = lr
        batch = [data.sample(rng) for _ in range(B)]
        ids, w = torch.stack([b[0] for b in batch]), torch.stack([b[1] for b in batch])
        with torch.autocast('cpu', dtype=torch.bfloat16):
            logits, stats = m(ids[:, :-1])
        ce = F.cross_entropy(logits.float().view(-1, V), ids[:, 1:].reshape(-1), reduction='none').view(B, -1)
        loss = (ce * w).sum() / w.sum()
        full = loss + 0.003 * sum(s['balance'] for s in stats) + (push * torch.stack([s['l1'] for s in stats])).sum()
        opt.zero_grad(set_to_none=True)
        full.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        opt.step()
        # the controller: the goal rises to TARGET over half of the time, and each
        # layer's weight doubles or halves in about 70 steps while it misses it
        seen = .9 * seen + .1 * torch.tensor([float(s['zeros']) for s in stats])
        goal = START + (TARGET - START) * min(1, done / .5)
        push = (push * torch.exp(.01 * ((goal - seen) / .03).clamp(-1, 1))).clamp(1e-5, 3)
        if step % 50 == 0:
            rate = (time.time() - t0) / (step - start + 1)
            zeros, weights = ([f'{v:.3g}' for v in t.tolist()] for t in (seen, push))
            print(step, f'loss {loss.item():.3f} {rate:.3f} s/step goal {goal:.3f} zeros', *zeros, 'push', *weights, flush=True)
        step += 1
        if step % 250 == 0:
            print('EVAL', step, evaluate(m, data), flush=True)
            save()
    print('END', step, evaluate(m, data), flush=True)
    save()


main()
