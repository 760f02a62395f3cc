#!/usr/bin/env python3
"""Writes ../../src/quants/grids.rs: the grids of the gguf package as bits, one for each point that a grid could have.

    pip install gguf==0.19.0 && python grids.py

Points are in the order of the numbers whose digits they are, the first the lowest. Every grid of ggml is in this order, so that the
bits say all of it.
"""

from pathlib import Path

import numpy as np
from gguf import quants

HEAD = '''//! The grids of the i-quants: points of four or eight numbers.
//!
//! They are those of ggml: `iq1s_grid`, `iq2xxs_grid`, `iq2xs_grid`, `iq2s_grid`, `iq3xxs_grid` and `iq3s_grid` (MIT,
//! `gguf/LICENSE-ggml`). `tests/samples/grids.py` writes this file.

/// The points whose bits are set, of all whose numbers are `levels`, in the order of the numbers whose digits they are, the first the
/// lowest. A digit of `bits` has four, the first the lowest.
const fn grid<const L: usize, const D: usize, const N: usize>(levels: [u8; L], bits: &[u8]) -> [[u8; D]; N] {
    let mut points = [[0; D]; N];
    let (mut at, mut n) = (0, 0);
    while at < 4 * bits.len() {
        let digit = match bits[at / 4] {
            digit @ b'0'..=b'9' => digit - b'0',
            letter => letter - b'a' + 10,
        };
        if digit >> (at % 4) & 1 == 1 {
            let (mut rest, mut i) = (at, 0);
            while i < D {
                points[n][i] = levels[rest % L];
                (rest, i) = (rest / L, i + 1);
            }
            n += 1;
        }
        at += 1;
    }
    assert!(n == N, "as many points as bits");
    points
}
'''
GRIDS = {
    "IQ1": (quants.IQ1_S, "IQ1_S and IQ1_M, each number plus 1"), "IQ2_XXS": (quants.IQ2_XXS, "IQ2_XXS"),
    "IQ2_XS": (quants.IQ2_XS, "IQ2_XS"), "IQ2_S": (quants.IQ2_S, "IQ2_S"),
    "IQ3_XXS": (quants.IQ3_XXS, "IQ3_XXS"), "IQ3_S": (quants.IQ3_S, "IQ3_S"),
}
DIGITS = 98


def table(name: str, of: type, what: str) -> str:
    """The table of one grid."""
    of.init_grid()
    points, n = of.grid_shape[0], of.grid_shape[1]
    levels = sorted(of.grid_map)
    digits = np.searchsorted(levels, of.grid.reshape(points, n))
    numbers = digits @ len(levels) ** np.arange(n)
    assert (np.diff(numbers) > 0).all(), name
    bits = np.zeros(-(-len(levels) ** n // 4) * 4, dtype=np.uint8)
    bits[numbers] = 1
    text = "".join(f"{nibble:x}" for nibble in bits.reshape(-1, 4) @ [1, 2, 4, 8])
    lines = " \\\n      ".join(text[i : i + DIGITS] for i in range(0, len(text), DIGITS)).replace(" \\", "\\")
    levels = [int(level - min(levels[0], 0)) for level in levels]
    return (f"\n/// The grid of {what}.\npub(super) static {name}: [[u8; {n}]; {points}] = grid(\n    {levels},\n"
            f'    b"{lines}",\n);\n')


path = Path(__file__).parents[2] / "src/quants/grids.rs"
path.write_text(HEAD + "".join(table(name, *row) for name, row in GRIDS.items()))
