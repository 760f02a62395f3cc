//! Random plans.

use super::basics::{float, list, text};
use super::graphs::{kind, scope, state_kind};
use moec_ir::op::Score;
use moec_ir::plan::*;
use moec_ir::{DType, EntryKind, Format, MOST_CPUS};
use proptest::prelude::*;

pub(super) fn layout() -> impl Strategy<Value = Layout> {
    (0..8, any::<u32>()).prop_map(|(which, nr)| match which {
        0 => Layout::Rows,
        1 => Layout::Panels { nr },
        2 => Layout::GluPanels { nr },
        5 => Layout::Gates,
        6 => Layout::UpDown,
        7 => Layout::Bundles,
        gate_bound => Layout::Neurons { gate_bound: gate_bound == 4 },
    })
}

pub(super) fn code() -> impl Strategy<Value = Code> {
    prop_oneof![
        any::<u32>().prop_map(Code::Kernel),
        any::<(u32, u32, Option<(u32, u32)>)>()
            .prop_map(|(half, scale, long)| Code::Builtin(Builtin::RopeAngles { half, scale, long })),
        any::<([u32; 3], bool, Option<(u32, u32)>)>().prop_map(
            |([rows, k, experts], partial, candidates)| {
                let candidates = candidates.map(|(layer, units)| Candidates { layer, units });
                Code::Builtin(Builtin::Dispatch { rows, k, experts, partial, candidates })
            }
        ),
        (
            any::<u32>(),
            prop_oneof![
                Just(Span::Rows),
                Just(Span::Whole),
                any::<[u32; 3]>().prop_map(|[rows, k, experts]| Span::Slots { rows, k, experts }),
            ]
        )
            .prop_map(|(words, span)| Code::Builtin(Builtin::Copy { words, span })),
        any::<(u32, u32, u32, [u32; 4])>().prop_map(|(layer, rows, k, strides)| Code::Builtin(
            Builtin::RequestExperts { layer, rows, k, strides }
        )),
        any::<[u32; 3]>().prop_map(|[layer, rows, k]| Code::Builtin(Builtin::RequestNeurons {
            layer,
            rows,
            k
        })),
        any::<[u32; 3]>().prop_map(|[set, k, channels]| Code::Builtin(Builtin::LimitCapacity {
            set,
            k,
            channels
        })),
        any::<u32>().prop_map(|subgraph| Code::Builtin(Builtin::Subgraph { subgraph })),
        any::<u32>().prop_map(|kernel| Code::Builtin(Builtin::Launch { kernel })),
        any::<(u32, u32, u32)>().prop_map(|(set, rows, k)| Code::Builtin(Builtin::Streams { set, rows, k })),
        any::<[u32; 4]>().prop_map(|[set, rows, k, hidden]| Code::Builtin(Builtin::Experts {
            set,
            rows,
            k,
            hidden
        })),
    ]
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let arg = prop_oneof![
        any::<(u32, u32)>().prop_map(|(b, o)| Arg::Buffer(b, o)),
        any::<u32>().prop_map(|b| Arg::Buffer(b, 0)),
        any::<u32>().prop_map(Arg::Segment),
        any::<u32>().prop_map(Arg::Matrices),
        any::<u32>().prop_map(Arg::State),
    ];
    let grid = prop_oneof![
        Just(Grid::One),
        any::<(u32, u32)>().prop_map(|(rows, tiles)| Grid::Tiles { rows, tiles }),
        any::<(u32, u32)>().prop_map(|(table, tiles)| Grid::Experts { table, tiles }),
        any::<[u32; 3]>().prop_map(|[table, blocks, columns]| Grid::Clusters { table, blocks, columns }),
    ];
    let deps = prop::collection::vec(any::<u32>(), 0..4);
    (code(), prop::collection::vec(arg, 0..4), grid, deps, any::<(u32, bool, bool, u32)>()).prop_map(
        |(code, args, grid, deps, (unit, outputs, barrier, node))| Step {
            unit,
            code,
            args,
            rows: if outputs { RowSpace::Outputs } else { RowSpace::Tokens },
            grid,
            barrier,
            deps,
            node,
        },
    )
}

pub(super) fn entry() -> impl Strategy<Value = Entry> {
    let buffer = (text(), any::<(u32, u64, u64, bool, u32, u32)>()).prop_map(
        |(name, (memory, offset, bytes, f, rows, stride))| {
            let dtype = if f { DType::F32 } else { DType::I32 };
            Buffer { name, memory, offset, bytes, dtype, rows, stride }
        },
    );
    let place = prop::option::of(any::<[u32; 3]>().prop_map(|[buffer, column, cols]| BufferColumns {
        buffer,
        column,
        cols,
    }));
    (kind(), any::<(u32, u32)>(), list(buffer, 0..4), list(place, 0..4), list(step(), 0..4)).prop_map(
        |(kind, (out_rows, logits), buffers, locations, steps)| Entry {
            kind,
            out_rows,
            buffers,
            logits,
            locations,
            steps,
        },
    )
}

/// Units, memories and links.
pub(super) fn units() -> impl Strategy<Value = (Vec<UnitRef>, Vec<Memory>, Vec<MemoryLink>)> {
    let unit = (text(), text(), any::<(u32, u32)>(), list(0_u32..MOST_CPUS, 0..4)).prop_map(
        |(name, backend, (memory, queues), cpus)| UnitRef {
            name,
            backend,
            memory,
            queues,
            cpus: cpus.into_iter().collect(),
        },
    );
    let resident = any::<(u32, Vec<u32>)>().prop_map(|(segment, matrices)| Resident { segment, matrices });
    let paging = prop::option::of(random_paging());
    let memory = (text(), any::<(Option<u64>, u64)>(), list(resident, 0..3), paging).prop_map(
        |(name, (capacity, arena_bytes), residents, paging)| Memory {
            name,
            capacity,
            arena_bytes,
            residents,
            paging,
        },
    );
    let link = any::<(u32, u32)>().prop_map(|(from, to)| MemoryLink { from, to });
    (list(unit, 0..3), list(memory, 0..3), list(link, 0..3))
}

pub(super) fn random_placement() -> impl Strategy<Value = Placement> {
    let number = || -1e3_f32..1e9;
    let row = (any::<[u32; 3]>(), any::<[Option<u32>; 2]>(), prop::option::of(number()), any::<bool>())
        .prop_map(|([capacity, group, unit], [tier, fallback], load, few)| ExpertRow {
            capacity,
            group,
            unit,
            tier,
            fallback,
            load,
            few,
        });
    let decode = (any::<[u32; 2]>(), list(number(), 0..3), text())
        .prop_map(|([batch, unit], cost_us, why)| DecodeUnit { batch, unit, cost_us, why });
    let decode = list(decode, 0..3);
    let group = (any::<([u32; 2], u64, [Vec<u32>; 2])>(), list(number(), 0..3), text(), decode).prop_map(
        |(([tier, unit], bytes, [experts, sizes]), cost_us, why, decode)| ExpertGroup {
            tier,
            unit,
            experts,
            sizes,
            bytes,
            cost_us,
            why,
            decode,
        },
    );
    let expected = (number(), number(), number()).prop_map(|(imbalance, overflow, padding)| Expected {
        imbalance,
        overflow,
        padding,
    });
    let table =
        (any::<(u32, u32, Vec<u32>)>(), prop::option::of(expected), list(group, 0..3), list(row, 0..3))
            .prop_map(|((layer, k, tiers), expected, groups, experts)| ExpertTable {
                layer,
                k,
                tiers,
                expected,
                groups,
                experts,
            });
    let op =
        (any::<(u32, u32, u32)>(), scope(), text(), text()).prop_map(|((n, unit, nodes), scope, op, why)| {
            let scope = scope.any_layer();
            OpAssignment { entry: EntryKind::Prefill(n), scope, op, unit, nodes, why }
        });
    let overflow = prop::sample::select(Overflow::ALL.to_vec());
    (any::<u32>(), overflow, list(text(), 0..3), list(op, 0..3), list(table, 0..3))
        .prop_map(|(chunk, overflow, units, ops, experts)| Placement { chunk, overflow, units, ops, experts })
}

pub(super) fn random_paging() -> impl Strategy<Value = Paging> {
    let score = prop::sample::select(Score::ALL.to_vec());
    let layer =
        (0..4_u32, any::<[u32; 4]>(), score).prop_map(|(experts, [layer, k, gate_up, down], score)| {
            PagedLayer { layer, experts, k, gate_up, down, score }
        });
    let layers = prop::collection::vec(layer, 0..4);
    let pinned = prop::collection::vec(any::<(u32, u32)>(), 0..3);
    let class = (text(), any::<(u32, bool, bool)>()).prop_map(|(name, (count, computes, reads))| CoreClass {
        name,
        count,
        computes,
        reads,
    });
    let artifact = (text(), any::<u64>()).prop_map(|(package, bytes)| ArtifactBytes { package, bytes });
    let regions = any::<(u64, u32)>().prop_map(|(graphs, frames)| Regions { graphs, frames });
    let loaded = (prop::collection::vec(artifact, 0..3), prop::collection::vec(regions, 0..3));
    let lists = (pinned, prop::collection::vec(class, 0..4), loaded);
    (any::<[u64; 4]>(), any::<[u32; 5]>(), text(), lists, layers).prop_map(
        |(bytes, [a, b, c, d, block_bytes], policy, (pinned, cores, (artifacts, regions)), layers)| {
            let matrices: u32 = layers.iter().map(|l| 2 * l.experts).sum();
            let [budget, resident, process, frame_bytes] = bytes;
            let (threads, frames, staging) = (a, b, c);
            let checksums = (0..matrices).map(|i| i.wrapping_mul(d)).collect();
            let uses = (0..if d % 2 == 0 { 0 } else { matrices / 2 }).map(|i| i.wrapping_mul(d)).collect();
            Paging {
                budget,
                threads,
                resident,
                process,
                frame_bytes,
                frames,
                staging,
                block_bytes,
                policy,
                pinned,
                neurons: d % 3,
                layers,
                checksums,
                uses,
                cores,
                artifacts,
                regions,
            }
        },
    )
}

pub(super) fn random_plan() -> impl Strategy<Value = Plan> {
    let segment = (text(), any::<(u32, u64, u64, u64)>(), list(any::<u32>(), 0..4), layout()).prop_map(
        |(name, (file, offset, bytes, pitch), shape, layout)| Segment {
            name,
            file,
            offset,
            bytes,
            pitch,
            shape,
            format: Format::F16,
            layout,
        },
    );
    let file = (text(), any::<(u64, [u8; 32])>()).prop_map(|(path, (bytes, sha256))| FileRef {
        path,
        bytes,
        sha256,
    });
    let order = prop_oneof![
        Just(CacheOrder::Rows),
        any::<u32>().prop_map(|nr| CacheOrder::Keys { nr }),
        any::<(u32, u32)>().prop_map(|(nr, block)| CacheOrder::Values { nr, block }),
    ];
    let formats = prop::sample::select(Format::ALL.to_vec());
    let state = (text(), any::<(u32, [u32; 4])>(), formats, order, state_kind(), any::<[u32; 2]>()).prop_map(
        |(name, (memory, shape), format, order, kind, [snapshots, rotated])| StateBuf {
            name,
            memory,
            shape,
            format,
            order,
            rotated,
            kind,
            snapshots,
        },
    );
    let texts = (list(text(), 0..3), units(), [text(), text(), text(), text()], list(text(), 0..3));
    let numbers = any::<([u32; 6], Option<u32>, Vec<u32>, [u64; 4])>();
    let few = prop::option::of((any::<u32>(), 0f32..=1.0));
    let few = few.prop_map(|few| few.map(|(experts, gamma)| BigLittle { experts, gamma }));
    let numbers = (numbers, few, prop::option::of(float()));
    let tensor = || (text(), any::<[u32; 4]>()).prop_map(|(name, shape)| GraphTensor { name, shape });
    let graph = (text(), text(), list(tensor(), 0..3), list(tensor(), 0..3), any::<bool>()).prop_map(
        |(package, function, inputs, outputs, stateful)| GraphDecl {
            package,
            function,
            inputs,
            outputs,
            stateful,
        },
    );
    let group = any::<(u32, u32, Vec<u32>)>().prop_map(|(graph, capacity, experts)| GraphGroup {
        graph,
        capacity,
        experts,
    });
    let overflow = prop::sample::select(Overflow::ALL.to_vec());
    let set = (any::<(u32, Vec<u32>)>(), overflow, list(group, 0..3), any::<[Option<u32>; 2]>()).prop_map(
        |((layer, capacities), overflow, groups, [batch, hot])| ExpertSet {
            layer,
            overflow,
            capacities,
            groups,
            batch,
            hot,
        },
    );
    let attention =
        any::<(u32, u32, Option<u32>, bool)>().prop_map(|(angles, context, window, one_call_per_row)| {
            SubgraphAttention { angles, context, window, one_call_per_row }
        });
    let part = (any::<(Vec<u32>, u32, u32)>(), prop::option::of(attention))
        .prop_map(|((graphs, inputs, outputs), attention)| Subgraph { graphs, inputs, outputs, attention });
    let paging = prop::option::of(random_paging());
    let statics = (
        list(graph, 0..3),
        list(set, 0..3),
        list(part, 0..3),
        (paging, random_streams(), random_experts()),
        list(random_launch(), 0..3),
    );
    let lists =
        (list(file, 0..3), list(segment, 0..3), list(state, 0..3), list(entry(), 0..3), random_placement());
    (texts, numbers, lists, statics).prop_map(
        |(
            (features, (units, memories, links), [family, name, triple, cpu], symbols),
            ((n, bos, eos, long), big_little, thresholded),
            lists,
            statics,
        )| {
            Plan {
                version: n[0],
                model: ModelInfo {
                    family,
                    vocab: n[1],
                    hidden: n[2],
                    layers: n[3],
                    max_context: n[4],
                    slots: n[5],
                    bos,
                    eos,
                    parameters: long[0],
                    active_parameters: long[1],
                    big_little,
                    thresholded,
                },
                target: TargetInfo { name, triple, cpu, features },
                units,
                memories,
                links,
                scratch_bytes: long[3],
                files: lists.0,
                segments: lists.1,
                states: lists.2,
                experts: statics.3.2,
                kernels: symbols
                    .into_iter()
                    .map(|symbol| KernelRef {
                        symbol,
                        results: Results::last(n[0] as usize % 9, n[1] as usize % 99),
                    })
                    .collect(),
                graphs: statics.0,
                expert_sets: statics.1,
                subgraphs: statics.2,
                entries: lists.3,
                placement: lists.4,
                paging: statics.3.0,
                streams: statics.3.1,
                launches: statics.4,
            }
        },
    )
}

pub(super) fn random_launch() -> impl Strategy<Value = GpuKernel> {
    let extent = prop_oneof![
        any::<u32>().prop_map(Extent::Fixed),
        any::<u32>().prop_map(|per| Extent::Rows { per }),
        any::<(u32, u32)>().prop_map(|(k, experts)| Extent::Active { k, experts }),
    ];
    let launch = (prop::array::uniform3(extent), any::<(u32, u32)>())
        .prop_map(|(grid, (block, shared))| Launch { grid, block, shared });
    let numbers = any::<(u32, u32, u8, u8)>();
    (text(), text(), numbers, launch).prop_map(|(artifact, symbol, (unit, operands, count, args), launch)| {
        let results = Results::last(count as usize, args as usize);
        GpuKernel { unit, artifact, symbol, operands, results, launch }
    })
}

pub(super) fn random_streams() -> impl Strategy<Value = Vec<StreamSet>> {
    let set = (text(), any::<([u32; 5], bool)>()).prop_map(|(artifact, (n, bias))| StreamSet {
        layer: n[0],
        unit: n[1],
        artifact,
        experts: n[2],
        hidden: n[3],
        inner: n[4],
        bias,
    });
    list(set, 0..3)
}

pub(super) fn random_experts() -> impl Strategy<Value = ExpertPlacement> {
    let us = || 0.0..1e12_f64;
    let curve = || list((any::<u32>(), us()), 0..4);
    let costs = ([curve(), curve(), curve()], [us(), us(), us(), us(), us()], any::<(u64, u64)>());
    let costs = costs.prop_map(|([hot, cpu, cold], n, (expert_bytes, row_bytes))| ExpertCosts {
        hot,
        cpu,
        cold,
        bring_us: n[0],
        striped_us: n[1],
        localized_us: n[2],
        internal_us: n[3],
        link_us: n[4],
        expert_bytes,
        row_bytes,
    });
    let words = (prop::sample::select(Refine::ALL.to_vec()), prop::sample::select(PromptUnits::ALL.to_vec()));
    let scheduled = (any::<(Option<u32>, [u32; 3], bool)>(), words, [curve(), curve(), curve()]);
    let score = prop::sample::select(Score::ALL.to_vec());
    let cached = ([text(), text()], text(), any::<[u32; 4]>(), [us(), us(), us(), us(), us()], score);
    let cached = (cached, list(any::<(u32, u32)>(), 0..3));
    let policy = (0..3, scheduled, cached, costs).prop_map(|(which, scheduled, cached, costs)| match which {
        0 => ExpertPolicy::Fixed,
        1 => {
            let ((hot, [cold, dimms, frames], moves), words, curves) = scheduled;
            let ((refine, prefill), [prompt_window, decode_window, traffic]) = (words, curves);
            ExpertPolicy::Scheduled(Scheduled {
                hot,
                cold,
                dimms,
                frames,
                moves,
                refine,
                prefill,
                prompt_window,
                decode_window,
                traffic,
                costs,
            })
        }
        _ => {
            let (
                (divides, keeps, [hot, frames, ahead, k], [gpu, cpu, link, launch_us, window_us], score),
                pinned,
            ) = cached;
            let first_us = [gpu, cpu, link];
            ExpertPolicy::Cached(Cached {
                hot,
                frames,
                divides,
                keeps,
                ahead,
                first_us,
                launch_us,
                k,
                score,
                pinned,
                window_us,
                costs,
            })
        }
    });
    let layer = any::<(u32, [Vec<u32>; 4], Vec<i32>)>().prop_map(
        |(layer, [units, starts, segments, brought], dimms)| ExpertLayer {
            layer,
            units,
            starts,
            segments,
            brought,
            dimms,
        },
    );
    (list(layer, 0..3), policy).prop_map(|(layers, policy)| ExpertPlacement { layers, policy })
}
