//! Units that Core ML chooses for the operations of a function, by its `MLComputePlan`.
//!
//! The plan is an expectation: Core ML has no report of the units that a prediction used.

use crate::operators;
use crate::unit::{configuration, error_text, refused, url};
use block2::RcBlock;
use moec_ir::plan::GraphDecl;
use moec_runtime::error::Result;
use moec_runtime::exec::operations::{GraphOperation, GraphOperations, OperationUnit};
use objc2::ClassType as _;
use objc2::runtime::NSObjectProtocol as _;
use objc2_core_ml::{
    MLCPUComputeDevice, MLComputePlan, MLComputePlanDeviceUsage, MLGPUComputeDevice,
    MLNeuralEngineComputeDevice,
};
use objc2_foundation::{NSError, NSString};
use std::path::Path;
use std::sync::mpsc;

/// Whether this version of macOS has compute plans.
pub(crate) fn is_available() -> bool {
    objc2::available!(macos = 14.4)
}

/// Operations of a function of a compiled package, with the units that Core ML prefers for them.
///
/// # Errors
/// A package that Core ML cannot load, or that has no such function.
pub(crate) fn operations(compiled: &Path, graph: &GraphDecl) -> Result<GraphOperations> {
    let name = format!("{}:{}", graph.package, graph.function);
    let url = url(compiled, &name)?;
    let configuration = configuration(&graph.function);
    let (sender, receiver) = mpsc::channel();
    let function = graph.function.clone();
    let handler = RcBlock::new(move |plan: *mut MLComputePlan, error: *mut NSError| {
        // SAFETY: each is null or an object that is valid while the block runs.
        let (plan, error) = unsafe { (plan.as_ref(), error.as_ref()) };
        let found = match (plan, error) {
            (Some(plan), _) => preferred(plan, &function),
            (None, Some(e)) => Err(format!("Core ML cannot plan it: {}", error_text(e))),
            (None, None) => Err("Core ML returned no compute plan".to_owned()),
        };
        // The receiver waits.
        let _ = sender.send(found);
    });
    // SAFETY: the URL names a folder that Core ML itself has written. Core ML calls the block once, on a thread
    // of its own: the block owns a name and a sender, which may be used there, and sends plain data.
    unsafe {
        MLComputePlan::loadContentsOfURL_configuration_completionHandler(&url, &configuration, &handler);
    }
    // The channel closes when Core ML releases the block, even if it was never called.
    drop(handler);
    let found = receiver.recv().unwrap_or_else(|_| Err("Core ML made no compute plan".to_owned()));
    let operations = found.map_err(|why| refused(&name, why))?;
    Ok(GraphOperations { package: graph.package.clone(), function: graph.function.clone(), operations })
}

/// Operations of a function with the preferred units of a plan.
fn preferred(plan: &MLComputePlan, function: &str) -> Result<Vec<GraphOperation>, String> {
    // SAFETY: properties of a plan, which nothing changes.
    let program = unsafe { plan.modelStructure().program() };
    let program =
        program.ok_or_else(|| "Core ML describes it as something else than a program".to_owned())?;
    // SAFETY: as above.
    let functions = unsafe { program.functions() };
    let found = functions.objectForKey(&NSString::from_str(function));
    let found = found.ok_or_else(|| {
        let names: Vec<String> = functions.keys().map(|name| format!("`{name}`")).collect();
        format!("its compute plan has no such function, but {}", names.join(", "))
    })?;
    // SAFETY: as above.
    let operations = unsafe { found.block().operations() };
    let mut all = Vec::new();
    for operation in &operations {
        // SAFETY: as above, and the operation is one of this plan.
        let (name, usage, cost) = unsafe {
            (
                operation.operatorName().to_string(),
                plan.computeDeviceUsageForMLProgramOperation(&operation),
                plan.estimatedCostOfMLProgramOperation(&operation).map(|cost| cost.weight()),
            )
        };
        if let Some(operator) = operators::computed(&name) {
            let unit = usage.and_then(|usage| unit(&usage));
            all.push(GraphOperation { operator: operator.to_owned(), unit, cost });
        }
    }
    Ok(all)
}

/// The preferred unit; `None` if it is of another kind than those known.
fn unit(usage: &MLComputePlanDeviceUsage) -> Option<OperationUnit> {
    // SAFETY: a property of an object that nothing changes.
    let device = unsafe { usage.preferredComputeDevice() };
    let classes = [
        (MLNeuralEngineComputeDevice::class(), OperationUnit::Npu),
        (MLCPUComputeDevice::class(), OperationUnit::Cpu),
        (MLGPUComputeDevice::class(), OperationUnit::Gpu),
    ];
    classes.into_iter().find_map(|(class, unit)| device.isKindOfClass(class).then_some(unit))
}
