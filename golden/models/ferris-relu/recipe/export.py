"""Writes ferris-relu as a checkpoint in SmallThinker's published spelling, with its reference outputs.

    python export.py OUT FERRIS

OUT: folder to write. FERRIS: ferris's folder, for the tokenizer and the evaluation sets. The reference is model.py in f32,
over weights rounded to bf16 as they are stored.
"""
import json
import math
import os
import shutil
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer

from model import E, HD, H, I, K, L, NH, NKV, ROPE, SLIDING, THETA, V, Model

WINDOW = 512
torch.set_num_threads(int(os.environ.get('NT', '1')))


def tensors(state):
    """Names of the published checkpoints; ferris-relu ties its embeddings, so that there is no `lm_head`."""
    out = {}
    for name, value in state.items():
        value = value.to(torch.bfloat16)
        base = 'model.' + name.split('.mlp.')[0] + '.block_sparse_moe.'
        if name.endswith('.mlp.gate.weight'):
            out[base + 'primary_router.weight'] = value.contiguous()
        elif name.endswith('.mlp.gu'):
            for e in range(E):
                out[f'{base}experts.{e}.gate.weight'] = value[e, :I].clone()
                out[f'{base}experts.{e}.up.weight'] = value[e, I:].clone()
        elif name.endswith('.mlp.dn'):
            for e in range(E):
                out[f'{base}experts.{e}.down.weight'] = value[e].clone()
        else:
            out['model.' + name] = value.contiguous()
    return out


CONFIG = dict(
    architectures=['SmallThinkerForCausalLM'], model_type='smallthinker', model_name='ferris_relu',
    bos_token_id=0, eos_token_id=0, head_dim=HD, hidden_size=H, initializer_range=0.02,
    max_position_embeddings=2048, moe_ffn_hidden_size=I, moe_num_active_primary_experts=K,
    moe_num_primary_experts=E, moe_primary_router_apply_softmax=False, moe_layer_layout=[1] * L,
    norm_topk_prob=True, num_attention_heads=NH, num_hidden_layers=L, num_key_value_heads=NKV,
    output_router_logits=False, rms_norm_eps=1e-6, rope_layout=ROPE, rope_scaling=None, rope_theta=THETA,
    sliding_window_layout=SLIDING, sliding_window_size=WINDOW, tie_word_embeddings=True,
    torch_dtype='bfloat16', use_cache=True, vocab_size=V)


@torch.no_grad()
def main(out, ferris):
    os.makedirs(out, exist_ok=True)
    state = torch.load('ckpt.pt')['m']
    stored = tensors(state)
    save_file(stored, out + '/model.safetensors', metadata={'format': 'pt'})
    dump = lambda value, name: open(f'{out}/{name}', 'w').write(json.dumps(value, indent=2) + '\n')
    dump(CONFIG, 'config.json')
    dump(dict(bos_token_id=0, eos_token_id=0, do_sample=False), 'generation_config.json')
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        shutil.copy(f'{ferris}/{name}', f'{out}/{name}')
    tk = Tokenizer.from_file(f'{ferris}/tokenizer.json')
    m = Model(window=WINDOW)
    m.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in state.items()})
    m.eval().experts_in(torch.float32)

    def greedy(ids, n):
        for _ in range(n):
            ids = torch.cat([ids, m(ids[None])[0][0, -1].argmax()[None]])
        return ids

    for prompt in ('The ownership rules in Rust', 'fn main() {', 'Chapter 4. The compiler'):
        ids = torch.tensor([0] + tk.encode(prompt).ids)
        print(repr(prompt), '->', repr(tk.decode(greedy(ids, 40)[len(ids):].tolist())))

    # as for ferris: 40 windows of 512, no context carried over
    ids = [0] + tk.encode(open(f'{ferris}/eval/text.txt').read()).ids
    total = count = 0
    live = torch.zeros(L)
    for o in range(0, min(len(ids) - 1, 512 * 40), 512):
        x = torch.tensor([ids[o:o + 513]])
        logits, stats = m(x[:, :-1])
        total += F.cross_entropy(logits[0], x[0, 1:], reduction='sum').item()
        count += x.shape[1] - 1
        for l, s in enumerate(stats):
            live[l] += s['live'].sum()
    zeros = 1 - live / (count * K * I)

    def right(question):
        a, b = [0] + tk.encode(question['prompt']).ids, tk.encode(question['answer']).ids
        logits = m(torch.tensor([a + b]))[0][0]
        return logits[len(a) - 1:-1].argmax(-1).tolist() == b

    questions = [json.loads(line) for line in open(f'{ferris}/eval/needle.jsonl')][:200]
    found = sum(map(right, questions)) / len(questions)
    metrics = {
        'perplexity': math.exp(total / count), 'needle': found,
        'zeros': zeros.mean().item(), 'zeros_by_layer': [round(z, 6) for z in zeros.tolist()]}
    dump(metrics, 'reference_metrics.json')
    print(metrics)
    ids = torch.tensor([0] + tk.encode(open(f'{ferris}/eval/text.txt').read()[:6000]).ids[:599])
    save_file({'input_ids': ids.int(), 'logits': m(ids[None])[0][0].float().contiguous(),
               'greedy_ids': greedy(ids[:64], 64).int()}, out + '/expected.safetensors')


main(sys.argv[1], sys.argv[2])
