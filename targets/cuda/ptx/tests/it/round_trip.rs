//! Printing and parsing round-trips for any module, and no text makes the parser panic.

use moec_ptx::module::*;
use moec_ptx::{Opcode, Space, Type, parse, print, verify};
use proptest::prelude::*;

fn name() -> impl Strategy<Value = String> {
    "[%$_a-zA-Z][a-zA-Z0-9_$]{1,6}(\\.[xyz])?"
}

fn ty() -> impl Strategy<Value = Type> {
    proptest::sample::select(Type::ALL)
}

fn literal() -> impl Strategy<Value = Literal> {
    prop_oneof![
        any::<i64>().prop_map(Literal::Integer),
        any::<u32>().prop_map(Literal::F32),
        any::<u64>().prop_map(Literal::F64),
    ]
}

fn offset() -> impl Strategy<Value = i64> {
    prop_oneof![Just(0), -(1i64 << 40)..1 << 40]
}

/// An operand that may be part of a list.
fn simple() -> impl Strategy<Value = Operand> {
    prop_oneof![
        (name(), offset()).prop_map(|(name, offset)| Operand::Name(name, offset)),
        name().prop_map(Operand::Not),
        literal().prop_map(Operand::Literal),
        (name(), offset()).prop_map(|(name, offset)| Operand::Address(Some(name), offset)),
        (0..1i64 << 40).prop_map(|at| Operand::Address(None, at)),
        (name(), name()).prop_map(|(a, b)| Operand::Pair(a, b)),
        Just(Operand::Nothing),
    ]
}

fn operand() -> impl Strategy<Value = Operand> {
    let many = || prop::collection::vec(simple(), 1..5);
    prop_oneof![4 => simple(), 1 => many().prop_map(Operand::Vector), 1 => many().prop_map(Operand::List)]
}

fn instruction() -> impl Strategy<Value = Instruction> {
    let guard = prop::option::of((any::<bool>(), name()).prop_map(|(not, name)| Guard { not, name }));
    let modifier = prop_oneof!["[a-z][a-z0-9_]{0,5}", Just("L1::no_allocate".to_owned())];
    let parts = (
        guard,
        proptest::sample::select(Opcode::ALL),
        prop::collection::vec(modifier, 0..4),
        prop::collection::vec(operand(), 0..5),
    );
    parts.prop_map(|(guard, opcode, modifiers, operands)| Instruction {
        line: Line(0),
        guard,
        opcode,
        modifiers,
        operands,
    })
}

fn variable(spaces: &'static [Space]) -> impl Strategy<Value = Variable> {
    let storable: Vec<_> = Type::ALL.iter().copied().filter(|ty| *ty != Type::Pred).collect();
    let parts = (
        proptest::sample::select(spaces),
        prop::option::of((0u32..8).prop_map(|n| 1 << n)),
        proptest::sample::select(vec![1, 2, 4]),
        proptest::sample::select(storable),
        name(),
        prop::collection::vec(1u64..9, 0..3),
        prop::collection::vec(literal(), 0..3),
        prop::option::of(prop::option::of(Just(Space::Global))),
    );
    parts.prop_map(|(space, align, vector, ty, name, array, values, pointer)| Variable {
        line: Line(0),
        linkage: None,
        space,
        align,
        vector,
        ty,
        pointer: pointer.map(|space| Pointer { space, align }),
        name,
        array,
        values,
    })
}

fn statement() -> impl Strategy<Value = Statement> {
    let registers = (ty(), prop::collection::vec((name(), prop::option::of(0u32..50)), 1..3))
        .prop_map(|(ty, names)| Statement::Registers(Registers { line: Line(0), ty, names }));
    let leaf = prop_oneof![
        6 => instruction().prop_map(Statement::Instruction),
        1 => registers,
        1 => variable(&[Space::Shared, Space::Local, Space::Param]).prop_map(Statement::Variable),
        1 => name().prop_map(|name| Statement::Label(Line(0), name)),
        1 => (name(), prop::collection::vec(name(), 1..4))
            .prop_map(|(name, targets)| Statement::Targets(Line(0), name, targets)),
        1 => "[a-z ]{0,8}".prop_map(Statement::Pragma),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| prop::collection::vec(inner, 0..4).prop_map(Statement::Block))
}

fn function() -> impl Strategy<Value = Function> {
    let limits = prop::collection::vec(
        (
            proptest::sample::select(vec![Limit::Threads, Limit::MaxThreads]),
            prop::collection::vec(1u32..99, 1..4),
        ),
        0..2,
    );
    let params = || prop::collection::vec(variable(&[Space::Param]), 0..3);
    let body = prop::option::of(prop::collection::vec(statement(), 0..8));
    let linkage =
        prop::option::of(proptest::sample::select(vec![Linkage::Visible, Linkage::Extern, Linkage::Weak]));
    (any::<bool>(), linkage, params(), name(), params(), limits, body).prop_map(
        |(entry, linkage, returns, name, params, limits, body)| Function {
            line: Line(0),
            entry,
            linkage,
            returns: if entry { Vec::new() } else { returns },
            name,
            params,
            limits,
            body,
        },
    )
}

fn module() -> impl Strategy<Value = Module> {
    let item = prop_oneof![
        variable(&[Space::Global, Space::Shared, Space::Const]).prop_map(Item::Variable),
        function().prop_map(Item::Function),
    ];
    prop::collection::vec(item, 0..4).prop_map(|items| Module {
        version: (8, 3),
        target: vec!["sm_80".into()],
        address_size: 64,
        items,
    })
}

proptest! {
    #[test]
    fn module_round_trips_through_text(module in module()) {
        let text = print(&module);
        match parse(&text) {
            Ok(again) => {
                prop_assert_eq!(print(&again), text.clone());
                prop_assert!(again == module, "{}", text);
            }
            Err(e) => return Err(TestCaseError::fail(format!("{e}\n{text}"))),
        }
    }

    #[test]
    fn changed_module_text_is_parsed_or_rejected(at in 0usize..4000, length in 0usize..20, with in "[ -~]{0,6}") {
        for name in crate::common::SAMPLES {
            let mut text = crate::common::sample(name);
            let from = at.min(text.len());
            let to = (from + length).min(text.len());
            text.replace_range(from..to, &with);
            if let Ok(module) = parse(&text) {
                let _ = verify(&module);
                prop_assert!(parse(&print(&module)).unwrap() == module);
            }
        }
    }
}
