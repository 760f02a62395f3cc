//! Files that match on the variants of operators, kernels, weight formats and mixers. Only the module of the
//! enum and the files of a table here may do so. Everything else that depends on a variant is a method in
//! that module, so a new operator or kernel takes one file and one row.

use crate::{files, packages, root};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path as FilePath;
use syn::parse::{ParseStream, Parser as _};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, Macro, Pat, Path, Token, Type, UseTree};

/// An enum that only its own module may match on.
struct Closed {
    name: &'static str,
    /// Its module: a folder or a file.
    module: &'static str,
    /// The crate that it is imported from, if other enums have the same name.
    from: Option<&'static str>,
}

const CLOSED: [Closed; 4] = [
    Closed { name: "Op", module: "ir/src/ops/", from: Some("moec_ir") },
    Closed { name: "KernelSpec", module: "codegen/src/spec/", from: None },
    Closed { name: "Format", module: "ir/src/format.rs", from: Some("moec_ir") },
    Closed { name: "Mixer", module: "compiler/import/src/mixers/", from: None },
];

/// Other files, or folders of files, that may match on an enum, and the reason.
const MATCHERS: [(&str, &str, &str); 28] = [
    ("codegen/src/dsl/", "Format", "loads and stores of numbers"),
    ("codegen/src/kernels/", "Format", "code that reads each format"),
    ("codegen/src/pack/", "Format", "order and rounding of packed weights"),
    ("codegen/src/gpu/", "Format", "code that reads each format on GPUs"),
    ("compiler/cli/src/report/speed.rs", "Op", "which steps read the cache, in an estimate for users"),
    ("compiler/cli/src/explain.rs", "Op", "which weights are matrices, in a table for users"),
    ("compiler/config/src/lib.rs", "Format", "names of formats in `model.toml`"),
    ("compiler/costs/src/model.rs", "Op", "what a layer computes, as numbers"),
    ("compiler/import/src/quantised/decode.rs", "Format", "formats that checkpoints hold"),
    ("compiler/measure/src/calibrate/collect.rs", "Op", "what is recorded at which operator"),
    ("compiler/measure/src/calibrate/roles.rs", "Op", "what is recorded at which operator"),
    ("compiler/measure/src/verify/", "Op", "errors that each operator may have"),
    ("compiler/passes/src/", "Op", "a pass rewrites, places or lays out the operators that it is about"),
    ("compiler/passes/src/rewrite/rules.rs", "Format", "formats that rules keep"),
    ("compiler/profile/src/table.rs", "Op", "what reads the table of embeddings"),
    ("ir/src/builder.rs", "Op", "row spaces, which gathered rows change"),
    ("ir/src/state.rs", "Format", "formats of caches"),
    ("ir/src/verify/graphs.rs", "Op", "rules between an operator and its neighbours"),
    ("targets/coreml/src/", "Op", "operators in Core ML's"),
    ("targets/cpu/src/", "Format", "kernels by format"),
    ("targets/cpu/src/fuse.rs", "KernelSpec", "rules that join two kernels"),
    ("targets/cpu/src/select.rs", "Op", "kernels by operator"),
    ("targets/cpu/src/tune.rs", "KernelSpec", "operands of a kernel that is measured"),
    ("targets/cuda/src/lib.rs", "Op", "operators that stay on the CPU"),
    ("targets/backend/src/find/", "Op", "parts of a model, recognised by their operators"),
    ("targets/mirror/src/lib.rs", "Op", "operators that stay on the CPU"),
    ("targets/ndp/src/backend", "Op", "operators in NDP command streams"),
    ("targets/qnn/src/backend/", "Op", "operators in QNN's"),
];

/// The enums that a file matches on.
#[derive(Default)]
struct Matches {
    /// Types of the `impl` blocks around the current item: name and first segment of the path.
    of: Vec<[String; 2]>,
    /// Imported names, each with its name in its crate, and the crate.
    imports: BTreeMap<String, [String; 2]>,
    /// Second last and first segments of the paths of patterns.
    found: BTreeSet<[String; 2]>,
    /// Names from which items are imported: modules, and enums whose variants are imported.
    opened: BTreeSet<String>,
}

impl Matches {
    fn in_source(text: &str) -> Self {
        let mut all = Self::default();
        all.visit_file(&syn::parse_file(text).unwrap());
        all
    }

    /// Whether a pattern of the file names a variant.
    fn names(&self, closed: &Closed, file: &str) -> bool {
        assert!(!self.opened.contains(closed.name), "{file} imports variants of `{}`", closed.name);
        self.found.iter().any(|[name, first]| {
            let [name, from] = self.imports.get(name).map_or([name, first], |[name, from]| [name, from]);
            // In its own crate the name of the enum is unique.
            let is_in_crate = file.starts_with(&closed.module[..=closed.module.find('/').unwrap()]);
            name == closed.name && closed.from.is_none_or(|c| from == c || is_in_crate)
        })
    }

    fn pattern(&mut self, path: &Path) {
        let names: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if let [.., name, _] = names.as_slice() {
            let of = self.of.last().cloned().filter(|_| name == "Self");
            self.found.insert(of.unwrap_or([name.clone(), names[0].clone()]));
        }
    }

    fn import(&mut self, tree: &UseTree, path: &[String]) {
        let (name, local) = match tree {
            UseTree::Path(at) => return self.import(&at.tree, &[path, &[at.ident.to_string()]].concat()),
            UseTree::Group(all) => return all.items.iter().for_each(|tree| self.import(tree, path)),
            UseTree::Glob(_) => return self.opened.extend(path.last().cloned()),
            UseTree::Name(name) => (&name.ident, &name.ident),
            UseTree::Rename(name) => (&name.ident, &name.rename),
        };
        let (name, local) = (name.to_string(), local.to_string());
        self.opened.extend(path.last().cloned());
        self.imports.insert(local, [name.clone(), path.first().cloned().unwrap_or(name)]);
    }
}

/// Whether an item is compiled for tests only.
fn is_of_tests(attributes: &[Attribute]) -> bool {
    let is_test = |a: &Attribute| a.parse_args::<Path>().is_ok_and(|what| what.is_ident("test"));
    attributes.iter().any(|a| a.path().is_ident("cfg") && is_test(a))
}

impl<'ast> Visit<'ast> for Matches {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Mod(module) if is_of_tests(&module.attrs) => {}
            Item::Use(import) if !is_of_tests(&import.attrs) => self.import(&import.tree, &[]),
            Item::Impl(block) => {
                let Type::Path(of) = &*block.self_ty else { return visit::visit_item(self, item) };
                let mut names = of.path.segments.iter().map(|s| s.ident.to_string());
                let first = names.next().unwrap();
                self.of.push([names.last().unwrap_or(first.clone()), first]);
                visit::visit_item(self, item);
                self.of.pop();
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_pat(&mut self, pat: &'ast Pat) {
        match pat {
            Pat::Struct(pat) => self.pattern(&pat.path),
            Pat::TupleStruct(pat) => self.pattern(&pat.path),
            Pat::Path(pat) => self.pattern(&pat.path),
            _ => {}
        }
        visit::visit_pat(self, pat);
    }

    /// `matches!`, and macros whose arguments are expressions.
    fn visit_macro(&mut self, call: &'ast Macro) {
        let arguments = |input: ParseStream<'_>| Punctuated::<Expr, Token![,]>::parse_terminated(input);
        let matched = |input: ParseStream<'_>| {
            let value: Expr = input.parse()?;
            input.parse::<Token![,]>()?;
            let pat = Pat::parse_multi_with_leading_vert(input)?;
            let guard = input.parse::<Option<Token![if]>>()?.map(|_| input.parse::<Expr>()).transpose()?;
            input.parse::<Option<Token![,]>>()?;
            Ok((value, pat, guard))
        };
        // The tokens are parsed into a value that does not live as long as the file.
        let mut inner = Matches { of: self.of.clone(), ..Matches::default() };
        if call.path.is_ident("matches") {
            let (value, pat, guard) = matched.parse2(call.tokens.clone()).unwrap();
            Visit::visit_expr(&mut inner, &value);
            Visit::visit_pat(&mut inner, &pat);
            if let Some(guard) = &guard {
                Visit::visit_expr(&mut inner, guard);
            }
        } else {
            let all = arguments.parse2(call.tokens.clone()).unwrap_or_default();
            for argument in &all {
                Visit::visit_expr(&mut inner, argument);
            }
        }
        self.found.extend(inner.found);
    }
}

/// Files that match on an enum outside of its module, with the enum's name. Tests are exempt.
fn matchers() -> BTreeSet<(String, &'static str)> {
    let is_code = |name: &str| {
        let is_rust = FilePath::new(name).extension().is_some_and(|e| e == "rs");
        is_rust && !name.contains("/tests/") && !name.ends_with("tests.rs")
    };
    let sources = packages().into_iter().flat_map(|package| files(&package.folder.join("src")));
    let names = sources.map(|path| path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
    let names: Vec<String> = names.filter(|name| is_code(name)).collect();
    assert!(names.len() > 300, "only {} sources", names.len());
    let of_file = |name: String| {
        let matches = Matches::in_source(&fs::read_to_string(root().join(&name)).unwrap());
        let all = CLOSED.iter().filter(|c| !name.starts_with(c.module) && matches.names(c, &name));
        all.map(|c| (name.clone(), c.name)).collect::<Vec<_>>()
    };
    names.into_iter().flat_map(of_file).collect()
}

#[test]
fn closed_enums_are_matched_in_their_module_or_listed_files() {
    let found = matchers();
    let is_of = |(file, name): &(String, &str), (place, of, _): &(&str, &str, &str)| {
        file.starts_with(place) && name == of
    };
    let unlisted: Vec<_> = found.iter().filter(|f| !MATCHERS.iter().any(|row| is_of(f, row))).collect();
    assert!(
        unlisted.is_empty(),
        "match in the enum's module, by a method of it, or give the reason in MATCHERS: {unlisted:#?}"
    );
    let idle: Vec<_> = MATCHERS.iter().filter(|row| !found.iter().any(|f| is_of(f, row))).collect();
    assert!(idle.is_empty(), "nothing matches there any more: remove the rows {idle:#?}");
}

#[test]
fn enum_patterns_are_found_in_every_syntax() {
    let op = Closed { name: "Op", module: "ir/src/ops/", from: Some("moec_ir") };
    let finds = |file: &str, body: &str| Matches::in_source(body).names(&op, file);
    let here = |body: &str| {
        finds("sim/src/lib.rs", &format!("use moec_ir::{{Op, Type}}; fn f(op: &Op) {{ {body}\n }}"))
    };
    for body in [
        "match op { Op::Embed => 1, _ => 2 };",
        "if let Some(Node { op: Op::Linear { bias, .. } }) = x {}",
        "let Op::Router(desc) = op else { return };",
        "while let Op::Add | Op::Mul = next() {}",
        "xs.filter(|&n| matches!(n, Op::Add if true));",
        "assert!(x && matches!(op, Op::Slice { heads: 1, .. },), \"why\");",
        "match x { moec_ir::Op::Add => 1, _ => 2 };",
    ] {
        assert!(here(body), "{body}");
    }
    for body in [
        "let x = Op::Embed;",
        "if *op == Op::Add {}",
        "match op { Other::Add => 1, _ => 2 };",
        "// Op::Add => {}",
    ] {
        assert!(!here(body), "{body}");
    }
    let aliased = "use moec_ir::Op as Operator; fn f() { match x { Operator::Add => 1 } }";
    assert!(finds("sim/src/lib.rs", aliased));
    assert!(finds(
        "sim/src/lib.rs",
        "impl Known for moec_ir::Op { fn f(&self) { match self { Self::Add => 1 } } }"
    ));
    // Another enum with the same name, and tests.
    assert!(!finds("sim/src/lib.rs", "use crate::isa::Op; fn f() { match x { Op::Add => 1 } }"));
    assert!(!finds(
        "sim/src/lib.rs",
        "enum Op { Add } impl Op { fn f(&self) { match self { Self::Add => 1 } } }"
    ));
    assert!(!finds(
        "sim/src/lib.rs",
        "use moec_ir::Op; #[cfg(test)] mod tests { fn f() { match x { Op::Add => 1 } } }"
    ));
}
