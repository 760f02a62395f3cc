//! Grid of settings for a choice.

use moec_runtime::offload::cache::{POLICIES, Scope, Setting};

/// Every setting of the parameters' grids, in the order of the table: for each policy the default values
/// first. Without scores, only policies that need none.
pub fn grid(scored: bool) -> Vec<Setting> {
    let mut all = Vec::new();
    for info in POLICIES.iter().filter(|p| scored || !p.scored) {
        let mut texts = vec![info.name.to_owned()];
        for parameter in info.parameters {
            let with =
                |v: &f64| texts.iter().map(|t| format!("{t} {}={v}", parameter.name)).collect::<Vec<_>>();
            texts = parameter.grid.iter().flat_map(with).collect();
        }
        for scope in info.scopes {
            let scope = if *scope == Scope::PerLayer { " per-layer" } else { "" };
            // Every entry of the table is valid.
            all.extend(texts.iter().filter_map(|text| format!("{text}{scope}").parse::<Setting>().ok()));
        }
    }
    all
}
