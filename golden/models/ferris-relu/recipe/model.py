"""ferris-relu: a small Mixture-of-Experts model in SmallThinker's form.

ReGLU experts, a router that reads the residual stream in front of attention
and its norm, and attention without rotary embedding on the layers whose
`ROPE` entry is 0. Parameters keep ferris's names, so that its checkpoint maps
onto them.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

V, H, L, NH, NKV, HD, E, K, I = 2048, 192, 4, 6, 2, 32, 24, 4, 96
THETA = 10000.0
ROPE = [1, 1, 0, 1]      # one layer of four has none, as in the 21B form
SLIDING = [1, 1, 0, 1]   # the layers with RoPE look at a window


class Norm(nn.Module):
    """RMS norm in f32."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Grouped-query attention, causal; RoPE (half-split) or none."""

    def __init__(self, rope):
        super().__init__()
        self.rope = rope
        self.q_proj = nn.Linear(H, NH * HD, bias=False)
        self.k_proj = nn.Linear(H, NKV * HD, bias=False)
        self.v_proj = nn.Linear(H, NKV * HD, bias=False)
        self.o_proj = nn.Linear(NH * HD, H, bias=False)

    def forward(self, x, cos, sin, mask):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, NH, HD).transpose(1, 2).float()
        k = self.k_proj(x).view(b, t, NKV, HD).transpose(1, 2).float()
        v = self.v_proj(x).view(b, t, NKV, HD).transpose(1, 2).float()
        if self.rope:
            turn = lambda z: torch.cat([-z[..., HD // 2:], z[..., :HD // 2]], -1)
            q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
        k, v = (z.repeat_interleave(NH // NKV, 1) for z in (k, v))
        y = (F.scaled_dot_product_attention(q, k, v, is_causal=True) if mask is None
             else F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Moe(nn.Module):
    """Top-k of the raw router logits, sigmoid of the chosen, divided by their sum.

    `dtype` is what the experts compute in. Rows of an expert are padded to 64:
    odd sizes are three times slower in bf16 on a CPU.
    """

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.gu = nn.Parameter(torch.empty(E, 2 * I, H))
        self.dn = nn.Parameter(torch.empty(E, H, I))
        self.dtype = torch.bfloat16

    def forward(self, router_input, x):
        b, t, _ = x.shape
        x = x.reshape(-1, H)
        with torch.autocast('cpu', enabled=False):
            logits = F.linear(router_input.reshape(-1, H).float(), self.gate.weight.float())
        top, index = logits.topk(K, -1)
        weight = top.sigmoid()
        weight = weight / weight.sum(-1, keepdim=True)
        flat = index.reshape(-1)
        order = flat.argsort(stable=True)
        load = torch.bincount(flat, minlength=E)
        source = order // K
        gus, dns = self.gu.to(self.dtype).unbind(0), self.dn.to(self.dtype).unbind(0)
        # `split`, not slices: the gradient of a slice is a tensor of the whole's size
        counts = load.tolist()
        rows = x.to(self.dtype)[source].split(counts)
        outs, live, total, square = [], [], 0.0, 0.0
        for e, n in enumerate(counts):
            if n == 0:
                live.append(torch.zeros(I, dtype=torch.long))
                continue
            gate, up = F.linear(F.pad(rows[e], (0, 0, 0, -n % 64)), gus[e]).chunk(2, -1)
            act = F.relu(gate)
            outs.append(F.linear(act * up, dns[e])[:n])
            live.append((act[:n] > 0).sum(0))
            # rows of padding are zero and add nothing
            a = act.float()
            total, square = total + a.sum(), square + a.square().sum()
        y = torch.cat(outs).float() * weight.reshape(-1)[order].unsqueeze(1)
        out = torch.zeros(b * t, H).index_add(0, source, y)
        share = load.float() / flat.numel()
        count = flat.numel() * I
        stats = {
            'load': load,
            'live': torch.stack(live),                       # [E, I] times active
            'zeros': 1 - torch.stack(live).sum() / count,
            # L1 over L2 of relu(gate): 1 when dense and even, free of scale
            'l1': (total / count) / (square / count + 1e-12).sqrt(),
            'balance': E * (share.detach() * logits.softmax(-1).mean(0)).sum(),
        }
        return out.view(b, t, H), stats


class Block(nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.input_layernorm = Norm(H)
        self.self_attn = Attention(rope)
        self.post_attention_layernorm = Norm(H)
        self.mlp = Moe()

    def forward(self, x, cos, sin, mask):
        h = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        y, stats = self.mlp(x, self.post_attention_layernorm(h))
        return h + y, stats


class Model(nn.Module):
    """`window`: width of the sliding layers; 0 for none."""

    def __init__(self, window=0, rope=ROPE, sliding=SLIDING):
        super().__init__()
        self.window, self.sliding = window, sliding
        self.embed_tokens = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Block(r) for r in rope)
        self.norm = Norm(H)

    def experts_in(self, dtype):
        for layer in self.layers:
            layer.mlp.dtype = dtype
        return self

    def forward(self, ids):
        t = ids.shape[1]
        inv = 1 / (THETA ** (torch.arange(0, HD, 2).float() / HD))
        angle = torch.outer(torch.arange(t).float(), inv)
        angle = torch.cat([angle, angle], -1)
        mask = None
        if 0 < self.window < t:
            back = torch.arange(t)[:, None] - torch.arange(t)[None]
            mask = (back >= 0) & (back < self.window)
        x, stats = self.embed_tokens(ids), []
        for layer, slides in zip(self.layers, self.sliding):
            x, s = layer(x, angle.cos(), angle.sin(), mask if slides else None)
            stats.append(s)
        return self.norm(x) @ self.embed_tokens.weight.T, stats
