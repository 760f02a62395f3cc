//! Finding, reading and checking a device description.

use crate::{
    Cluster, Device, DeviceError, DeviceUnit, Dimms, Figure, NATIVE, ParallelRate, UnitKind, host, nearest,
    nodes, several,
};
use moec_runtime::platform::regular;
use std::collections::BTreeSet;
use std::path::Path;

/// The built-in devices: name and text of the file, in the order in which they are listed.
pub const BUILT_IN: &[(&str, &str)] = &[
    ("native", include_str!("../../devices/native.toml")),
    ("x86-64-v3", include_str!("../../devices/x86-64-v3.toml")),
    ("x86-64-v4", include_str!("../../devices/x86-64-v4.toml")),
    ("sapphire-rapids", include_str!("../../devices/sapphire-rapids.toml")),
    ("neoverse-v2", include_str!("../../devices/neoverse-v2.toml")),
    ("apple-m2", include_str!("../../devices/apple-m2.toml")),
    ("cortex-x4", include_str!("../../devices/cortex-x4.toml")),
    ("m2-max", include_str!("../../devices/m2-max.toml")),
    ("m2-ultra", include_str!("../../devices/m2-ultra.toml")),
    ("snapdragon-8-gen-3", include_str!("../../devices/snapdragon-8-gen-3.toml")),
    ("snapdragon-8-plus-gen-1", include_str!("../../devices/snapdragon-8-plus-gen-1.toml")),
    ("spr-ndp", include_str!("../../devices/spr-ndp.toml")),
    ("h100-spr-ndp", include_str!("../../devices/h100-spr-ndp.toml")),
    ("a6000-xeon", include_str!("../../devices/a6000-xeon.toml")),
    ("rtx4080-i5", include_str!("../../devices/rtx4080-i5.toml")),
    ("h100-x86", include_str!("../../devices/h100-x86.toml")),
];

/// Most rows that capacities may be multiples of: those of the largest chunk of a prompt.
const MOST_ALIGNMENT: f64 = 4096.0;
/// Most graphs that a unit may run at a time: each has a thread and buffers of its own.
const MOST_QUEUES: f64 = 64.0;

/// Most hosts of one device.
pub(crate) const MOST_HOSTS: usize = 64;

impl Device {
    /// The device of that name, or of the user's own file: what ends in `.toml` or holds a `/` is a path.
    ///
    /// # Errors
    /// No such name, the file cannot be read, or its contents are wrong.
    pub fn find(name_or_path: &str) -> Result<Self, DeviceError> {
        let path = Path::new(name_or_path);
        if let Some((name, text)) = BUILT_IN.iter().find(|(name, _)| *name == name_or_path) {
            return Self::parse(text, Path::new(&format!("{name}.toml")));
        }
        if let Some(text) = several::find(name_or_path) {
            return Self::parse(&text?, Path::new(&format!("{name_or_path}.toml")));
        }
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("toml")) || name_or_path.contains('/') {
            let text = regular::read_text(path, regular::SETTINGS)
                .map_err(|source| DeviceError::Read { path: path.into(), source })?;
            let device = Self::parse(&text, path)?;
            return match nodes::absent(&device) {
                Some(message) => {
                    Err(DeviceError::Invalid { path: path.into(), key: nodes::KEY.into(), message })
                }
                None => Ok(device),
            };
        }
        Err(DeviceError::Unknown {
            name: name_or_path.into(),
            nearest: nearest(name_or_path, BUILT_IN.iter().map(|(name, _)| *name)),
        })
    }

    /// Reads a description; `path` is for messages only.
    ///
    /// # Errors
    /// The text is not a device description.
    pub fn parse(text: &str, path: &Path) -> Result<Self, DeviceError> {
        let mut device: Self = toml::from_str(text).map_err(|e| {
            let at = e.span().map_or(0, |s| s.start);
            let before = text.get(..at).unwrap_or(text);
            DeviceError::Parse {
                path: path.into(),
                line: before.matches('\n').count() + 1,
                column: before.rsplit('\n').next().unwrap_or(before).chars().count() + 1,
                message: e.message().into(),
            }
        })?;
        device.check().map_err(|(key, message)| DeviceError::Invalid { path: path.into(), key, message })?;
        if device.is_native() && device.caches.is_empty() {
            device.caches = host::caches();
        }
        Ok(device)
    }

    /// The first value that makes no sense: its key, and why.
    fn check(&self) -> Result<(), (String, String)> {
        let bad = |key: &str, message: &str| Err((key.to_owned(), message.to_owned()));
        let word = |s: &str| {
            !s.is_empty() && s.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        for (key, value) in [("name", &self.name), ("triple", &self.triple), ("cpu", &self.cpu)] {
            if !word(value) {
                return bad(key, "expected letters, digits, `-`, `_` and `.`, at least one");
            }
        }
        if (self.cpu == NATIVE) != (self.triple == NATIVE) {
            return bad("cpu", "`cpu` and `triple` must both be `native`, or neither");
        }
        if self.is_native() && !self.features.is_empty() {
            return bad("features", "`native` uses the features of the machine that builds: remove them");
        }
        if let Some(f) = self.features.iter().find(|f| !word(f)) {
            return bad("features", &format!("`{f}` is not an LLVM feature name; write them without `+`"));
        }
        let host_names: BTreeSet<&str> = self.hosts.iter().map(|h| h.name.as_str()).collect();
        if host_names.len() < self.hosts.len()
            || self.hosts.len() >= MOST_HOSTS
            || !host_names.iter().all(|h| word(h))
        {
            return bad("host.name", "a name is empty, invalid or a duplicate, or there are too many hosts");
        }
        let of_units = self.units.iter().map(|u| ("unit.host", &u.host));
        let of_memories = self.memories.iter().map(|m| ("memory.host", &m.host));
        for (key, host) in of_units.chain(of_memories) {
            if let Some(host) = host.as_deref().filter(|host| !host_names.contains(host)) {
                return bad(key, &format!("no host is named `{host}`"));
            }
        }
        let mut names = BTreeSet::new();
        for (key, name) in self
            .units
            .iter()
            .map(|u| ("unit.name", &u.name))
            .chain(self.memories.iter().map(|m| ("memory.name", &m.name)))
        {
            if !word(name) || !names.insert(name.as_str()) {
                return bad(key, &format!("`{name}` is empty, invalid or a duplicate"));
            }
        }
        let of_memories = self.memories.iter().flat_map(|m| m.bandwidth.iter().chain(&m.sequential));
        let of_memories = of_memories.filter_map(|b| b.achieved.as_ref());
        let shares = of_memories.chain(self.links.iter().filter_map(|l| l.achieved.as_ref()));
        check_shares(shares).or_else(|()| bad("achieved", NO_SHARE))?;
        for l in &self.links {
            if let Some(end) = [&l.from, &l.to].into_iter().find(|e| !names.contains(e.as_str())) {
                return bad("link", &format!("no unit or memory is named `{end}`"));
            }
        }
        for u in &self.units {
            check_unit(u)?;
            if let Some(memory) = &u.memory
                && !self.memories.iter().any(|m| m.name == *memory)
            {
                return bad("unit.memory", &format!("no memory is named `{memory}`"));
            }
        }
        // Steps are the CPU's by default.
        if self.units.iter().position(|u| u.kind == UnitKind::Cpu).is_some_and(|at| at > 0) {
            return bad("unit", "the CPU must be the first unit");
        }
        nodes::check(self).map_err(|message| (nodes::KEY.to_owned(), message))?;
        self.check_memories()?;
        for m in &self.memories {
            if m.available.as_ref().zip(m.capacity.as_ref()).is_some_and(|(a, c)| a.value > c.value) {
                return bad("memory.available", "more than the memory has");
            }
            if !m.ranges.is_sorted_by(|a, b| a.range_bytes < b.range_bytes) {
                return bad("memory.ranges", "ranges must ascend");
            }
            if m.shared_queue.as_ref().is_some_and(|f| f.value > 1.0) {
                return bad("memory.shared_queue", "a share must be at most 1");
            }
            if let Some(cluster) = m.reads_on.as_ref().map(|c| &c.value) {
                check_cluster(cluster, self.clusters())?;
            }
        }
        let mut levels = BTreeSet::new();
        for c in &self.caches {
            if !(1..=3).contains(&c.level) || !levels.insert(c.level) {
                return bad("cache.level", &format!("{} is not in 1..=3, or given twice", c.level));
            }
            if c.bytes == 0 {
                return bad("cache.bytes", "a cache must have at least one byte");
            }
            if c.shared_by == Some(0) {
                return bad("cache.shared_by", "a cache must belong to at least one core");
            }
        }
        for (key, value, source) in self.figures() {
            if !value.is_finite() || value < 0.0 {
                return bad(key, &format!("{value} is not a finite number of at least 0"));
            }
            if source.trim().is_empty() {
                return bad(key, "a figure needs a `source`");
            }
        }
        Ok(())
    }

    /// Units beside the CPU's memory have one of a known size, and a link to the CPU's, both ways.
    fn check_memories(&self) -> Result<(), (String, String)> {
        let host = self.cpu_memory();
        for u in &self.units {
            let Some(memory) = u.memory.as_deref().filter(|m| Some(*m) != host) else { continue };
            let of = self.memories.iter().find(|m| m.name == memory);
            // The system of another host knows its memory.
            if u.host.is_none() && of.is_none_or(|m| m.capacity.as_ref().is_none_or(|c| c.value < 1.0)) {
                return Err((
                    "memory.capacity".into(),
                    format!("`{memory}` needs one, because `{}` works in it", u.name),
                ));
            }
            if let Some(other) = self.units.iter().find(|o| o.memory == u.memory && o.name != u.name) {
                let message = format!(
                    "`{memory}` is the memory of `{}` and of `{}`: each needs its own",
                    other.name, u.name
                );
                return Err(("unit.memory".into(), message));
            }
            let host = host.unwrap_or_default();
            for (from, to) in [(host, memory), (memory, host)] {
                if self.link(from, to).is_none_or(|l| l.gb_per_s <= 0.0) {
                    return Err((
                        "link".into(),
                        format!("there is none from `{from}` to `{to}`, where `{}` works", u.name),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Every figure: key, value, source.
    fn figures(&self) -> Vec<(&'static str, f64, &str)> {
        let mut out = Vec::new();
        for u in &self.units {
            let figures = [
                ("unit.dispatch_cost_us", &u.dispatch_cost_us),
                ("unit.sync_cost_us", &u.sync_cost_us),
                ("unit.max_graph_bytes", &u.max_graph_bytes),
                ("unit.capacity_alignment", &u.capacity_alignment),
                ("unit.bandwidth_gb_per_s", &u.bandwidth_gb_per_s),
                ("unit.achieved_bandwidth", &u.achieved_bandwidth),
                ("unit.context_cost_us", &u.context_cost_us),
                ("unit.busy_w", &u.busy_w),
                ("unit.queues", &u.queues),
            ];
            for (key, figure) in figures {
                out.extend(figure.iter().map(|f| (key, f.value, &*f.source)));
            }
            out.extend(u.source.iter().map(|source| ("unit.source", 0.0, &**source)));
            if let Some(d) = &u.dimms {
                let figures = [
                    ("unit.dimms.capacity", Some(&d.capacity)),
                    ("unit.dimms.gops", Some(&d.gops)),
                    ("unit.dimms.link_gb_per_s", d.link_gb_per_s.as_ref()),
                ];
                out.extend(figures.into_iter().filter_map(|(key, f)| Some((key, f?.value, &*f?.source))));
            }
            for c in &u.clusters {
                out.push(("unit.cluster.ghz", c.ghz.value, &*c.ghz.source));
                out.extend(
                    c.disk_mb_per_s.iter().map(|f| ("unit.cluster.disk_mb_per_s", f.value, &*f.source)),
                );
            }
            out.extend(u.hexagon.iter().map(|h| ("unit.hexagon", f64::from(h.soc), &*h.source)));
            out.extend(u.graph.sources());
            out.extend(u.matmul.iter().map(|m| ("unit.matmul", m.ms, &*m.source)));
            out.extend(u.parallel.iter().map(|p| ("unit.parallel", p.speedup, &*p.source)));
            out.extend(u.legality.iter().map(|l| ("unit.legality", 0.0, &*l.source)));
            out.extend(u.peak.values().map(|p| ("unit.peak", p.gops, &*p.source)));
            let achieved = u.peak.values().filter_map(|p| p.achieved.as_ref());
            out.extend(achieved.map(|f| ("unit.peak.achieved", f.value, &*f.source)));
        }
        for m in &self.memories {
            out.extend(m.capacity.iter().map(|f| ("memory.capacity", f.value, &*f.source)));
            out.extend(m.busy_w.iter().map(|f| ("memory.busy_w", f.value, &*f.source)));
            out.extend(m.available.iter().map(|f| ("memory.available", f.value, &*f.source)));
            out.extend(m.bandwidth.iter().map(|b| ("memory.bandwidth", b.gb_per_s, &*b.source)));
            out.extend(m.shared_gb_per_s.iter().map(|f| ("memory.shared_gb_per_s", f.value, &*f.source)));
            out.extend(m.sequential.iter().map(|b| ("memory.sequential", b.gb_per_s, &*b.source)));
            out.extend(m.ranges.iter().map(|b| ("memory.ranges", b.gb_per_s, &*b.source)));
            out.extend(m.shared_queue.iter().map(|f| ("memory.shared_queue", f.value, &*f.source)));
            out.extend(m.reads_on.iter().map(|c| ("memory.reads_on", 0.0, &*c.source)));
        }
        let of_links = self.links.iter().filter_map(|l| l.achieved.as_ref());
        let rows = self.memories.iter().flat_map(|m| m.bandwidth.iter().chain(&m.sequential));
        let achieved = rows.filter_map(|b| b.achieved.as_ref()).chain(of_links);
        out.extend(achieved.map(|f| ("achieved", f.value, &*f.source)));
        out.extend(self.caches.iter().map(|c| ("cache", c.bytes as f64, &*c.source)));
        out.extend(self.links.iter().map(|l| ("link", l.gb_per_s, &*l.source)));
        let latencies = self.links.iter().filter_map(|l| Some((l.latency_us?, &*l.source)));
        out.extend(latencies.map(|(us, source)| ("link.latency_us", us, source)));
        if let Some(p) = &self.power {
            out.extend(p.idle_w.iter().map(|f| ("power.idle_w", f.value, &*f.source)));
            out.extend(p.busy_w.iter().map(|f| ("power.busy_w", f.value, &*f.source)));
        }
        out
    }
}

/// Reason that a share is refused.
const NO_SHARE: &str = "the achieved rate must be a share above 0 and at most 1";

/// Fails if one is not a share.
fn check_shares<'a>(mut shares: impl Iterator<Item = &'a Figure>) -> Result<(), ()> {
    if shares.all(|f| f.value > 0.0 && f.value <= 1.0) { Ok(()) } else { Err(()) }
}

/// Fails if the CPU has no such cluster of cores.
fn check_cluster(name: &str, clusters: &[Cluster]) -> Result<(), (String, String)> {
    if clusters.iter().any(|c| c.name == name) {
        return Ok(());
    }
    let known: Vec<_> = clusters.iter().map(|c| format!("`{}`", c.name)).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    let message = format!("no cluster of the CPU is named `{name}`; it has {known}");
    Err(("memory.reads_on".to_owned(), message))
}

/// The first value of a unit that makes no sense: its key, and why.
fn check_unit(u: &DeviceUnit) -> Result<(), (String, String)> {
    let bad = |key: &str, message: String| Err((key.to_owned(), message));
    if !u.matmul.is_sorted_by(|a, b| a.rows < b.rows) || u.matmul.iter().any(|m| m.rows == 0) {
        return bad("unit.matmul", "rows must ascend, from 1".into());
    }
    if u.matmul.iter().any(|m| m.weights == 0 || m.ms <= 0.0) {
        return bad("unit.matmul", "matrices must have weights and a time above 0".into());
    }
    if u.queues.as_ref().is_some_and(|f| f.value.fract() != 0.0 || !(1.0..=MOST_QUEUES).contains(&f.value)) {
        return bad("unit.queues", format!("expected a whole number in 1..={MOST_QUEUES}"));
    }
    let known = |p: &ParallelRate| p.graphs > 1 && (1.0..=f64::from(p.graphs)).contains(&p.speedup);
    if !u.parallel.iter().all(known) || !u.parallel.is_sorted_by(|a, b| a.graphs < b.graphs) {
        return bad(
            "unit.parallel",
            "numbers of graphs must ascend from 2, each with a speedup from 1 to that number".into(),
        );
    }
    if let Some(d) = &u.dimms {
        check_dimms(d)?;
    }
    let of_clusters: u64 = u.clusters.iter().map(|c| u64::from(c.cores)).sum();
    if !u.clusters.is_empty() && u.cores.map(u64::from) != Some(of_clusters) {
        return bad(
            "unit.cluster",
            format!("clusters have {of_clusters} cores in all, which `cores` must equal"),
        );
    }
    if u.clusters.iter().any(|c| c.cores == 0) {
        return bad("unit.cluster.cores", "a cluster must have at least one core".into());
    }
    let mut names = BTreeSet::new();
    if let Some(c) = u.clusters.iter().find(|c| !names.insert(c.name.as_str())) {
        return bad("unit.cluster.name", format!("`{}` occurs twice", c.name));
    }
    if u.hexagon.as_ref().is_some_and(|h| h.vtcm_mib == 0 || h.vtcm_mib > 64) {
        return bad("unit.hexagon.vtcm_mib", "expected 1 to 64".into());
    }
    let mut ops = BTreeSet::new();
    if let Some(op) = u.legality.iter().flat_map(|row| &row.ops).find(|op| !ops.insert(op.as_str())) {
        return bad("unit.legality", format!("`{op}` has two rows"));
    }
    let mut forms = u.legality.iter().filter_map(|row| row.form.as_deref());
    if let Some(form) = forms.find(|form| !u.runs(form)) {
        return bad("unit.legality.form", format!("`{form}` is not an operator that the unit runs directly"));
    }
    if let Some((key, message)) = u.graph.fault() {
        return bad(key, message);
    }
    let shares = u.peak.values().filter_map(|p| p.achieved.as_ref()).chain(&u.achieved_bandwidth);
    check_shares(shares).or_else(|()| bad("unit", NO_SHARE.into()))?;
    // Numbers that are not whole would give capacities and limits that no graph has.
    let whole = [("max_graph_bytes", &u.max_graph_bytes), ("capacity_alignment", &u.capacity_alignment)];
    for (key, figure) in whole {
        if figure.as_ref().is_some_and(|f| f.value < 1.0 || f.value.fract() != 0.0) {
            return bad(&format!("unit.{key}"), "expected a whole number of at least 1".into());
        }
    }
    if u.capacity_alignment.as_ref().is_some_and(|f| f.value > MOST_ALIGNMENT) {
        return bad(
            "unit.capacity_alignment",
            format!("expected at most {MOST_ALIGNMENT}, the largest chunk"),
        );
    }
    Ok(())
}

/// The first invalid value of NDP DIMMs: its key, and why.
fn check_dimms(d: &Dimms) -> Result<(), (String, String)> {
    let numbers = [
        ("count", d.count, 256),
        ("channels", d.channels, 64),
        ("ranks", d.ranks, 16),
        ("bank_groups", d.bank_groups, 16),
        ("banks", d.banks, 16),
        ("row_bytes", d.row_bytes, 1 << 16),
    ];
    for (key, n, most) in numbers {
        if n == 0 || n > most {
            return Err((format!("unit.dimms.{key}"), format!("{n} is not in 1..={most}")));
        }
    }
    if !d.count.is_multiple_of(d.channels) {
        let message = format!("{} DIMMs cannot be divided evenly among {} channels", d.count, d.channels);
        return Err(("unit.dimms.count".into(), message));
    }
    if !d.row_bytes.is_multiple_of(64) {
        let message = format!("rows of {} bytes are not whole lines of 64", d.row_bytes);
        return Err(("unit.dimms.row_bytes".into(), message));
    }
    if d.gops.value <= 0.0 || d.link_gb_per_s.as_ref().is_some_and(|f| f.value <= 0.0) {
        return Err(("unit.dimms".into(), "units and links need a rate above 0".into()));
    }
    let whole = |x: f64| x.fract() == 0.0 && (1.0..=1e15).contains(&x);
    if !whole(d.capacity.value) {
        return Err(("unit.dimms.capacity".into(), "expected a whole number of bytes, at least 1".into()));
    }
    Ok(())
}
