//! An object loaded into this process, through LLVM's ORC.
#![expect(clippy::cast_possible_truncation, reason = "an address of this process")]

use crate::error::{Error, Result};
use inkwell::llvm_sys::core::LLVMCreateMemoryBufferWithMemoryRangeCopy;
use inkwell::llvm_sys::error::{LLVMDisposeErrorMessage, LLVMErrorRef, LLVMGetErrorMessage};
use inkwell::llvm_sys::orc2::lljit::{
    LLVMOrcCreateLLJIT, LLVMOrcDisposeLLJIT, LLVMOrcLLJITAddObjectFile, LLVMOrcLLJITGetMainJITDylib,
    LLVMOrcLLJITLookup, LLVMOrcLLJITMangleAndIntern, LLVMOrcLLJITRef,
};
use inkwell::llvm_sys::orc2::{
    LLVMJITEvaluatedSymbol, LLVMJITSymbolFlags, LLVMJITSymbolGenericFlags, LLVMOrcAbsoluteSymbols,
    LLVMOrcCSymbolMapPair, LLVMOrcJITDylibDefine,
};
use inkwell::targets::{InitializationConfig, Target};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

/// A kernel: `(args, n, begin, end, scratch)`, see [`crate::spec`].
pub type KernelFn = unsafe extern "C" fn(*const *mut u8, i64, i64, i64, *mut u8);

unsafe extern "C" {
    fn memcpy(to: *mut c_void, from: *const c_void, n: usize) -> *mut c_void;
    fn memmove(to: *mut c_void, from: *const c_void, n: usize) -> *mut c_void;
    fn memset(to: *mut c_void, byte: c_int, n: usize) -> *mut c_void;
    #[cfg(target_vendor = "apple")]
    fn bzero(to: *mut c_void, n: usize);
}

/// Object code in this process; it stays executable as long as this lives.
#[derive(Debug)]
pub struct Loaded {
    jit: LLVMOrcLLJITRef,
}

// SAFETY: LLJIT synchronises its own sessions; this type only looks symbols up after construction.
unsafe impl Send for Loaded {}
// SAFETY: as above; concurrent lookups take the session's lock.
unsafe impl Sync for Loaded {}

impl Loaded {
    /// Loads an object for this host. It may call `memcpy`, `memmove` and `memset`, on Apple's systems
    /// `bzero`, and nothing else.
    ///
    /// # Errors
    /// [`Error::Load`] if the object is malformed, for another machine, or wants an unknown symbol.
    pub fn new(object: &[u8]) -> Result<Self> {
        Target::initialize_native(&InitializationConfig::default()).map_err(Error::Load)?;
        let mut jit = ptr::null_mut();
        // SAFETY: a null builder requests the host's defaults; `jit` receives the instance.
        check(unsafe { LLVMOrcCreateLLJIT(&raw mut jit, ptr::null_mut()) })?;
        let loaded = Self { jit };
        loaded.define_memory_functions()?;
        // SAFETY: the range is valid and copied; the buffer passes to the JIT below.
        let buffer = unsafe {
            LLVMCreateMemoryBufferWithMemoryRangeCopy(
                object.as_ptr().cast::<c_char>(),
                object.len(),
                c"kernels".as_ptr(),
            )
        };
        // SAFETY: the JIT and its main library live; ownership of the buffer passes even on failure.
        check(unsafe { LLVMOrcLLJITAddObjectFile(jit, LLVMOrcLLJITGetMainJITDylib(jit), buffer) })?;
        Ok(loaded)
    }

    fn define_memory_functions(&self) -> Result<()> {
        let symbols: &[(&CStr, u64)] = &[
            (c"memcpy", memcpy as *const () as u64),
            (c"memmove", memmove as *const () as u64),
            (c"memset", memset as *const () as u64),
            #[cfg(target_vendor = "apple")]
            (c"bzero", bzero as *const () as u64),
        ];
        let flags = || LLVMJITSymbolFlags {
            GenericFlags: LLVMJITSymbolGenericFlags::LLVMJITSymbolGenericFlagsExported as u8
                | LLVMJITSymbolGenericFlags::LLVMJITSymbolGenericFlagsCallable as u8,
            TargetFlags: 0,
        };
        let mut pairs: Vec<LLVMOrcCSymbolMapPair> = symbols
            .iter()
            .map(|(name, address)| LLVMOrcCSymbolMapPair {
                // SAFETY: the JIT lives and the name is a C string; the reference passes to the pair.
                Name: unsafe { LLVMOrcLLJITMangleAndIntern(self.jit, name.as_ptr()) },
                Sym: LLVMJITEvaluatedSymbol { Address: *address, Flags: flags() },
            })
            .collect();
        // SAFETY: the pairs are valid for the call, which takes over their names; the unit passes to the
        // library.
        check(unsafe {
            let unit = LLVMOrcAbsoluteSymbols(pairs.as_mut_ptr(), pairs.len());
            LLVMOrcJITDylibDefine(LLVMOrcLLJITGetMainJITDylib(self.jit), unit)
        })
    }

    /// The kernel of that symbol. Calling it is sound only while `self` lives and with the arguments that
    /// its [`crate::KernelSpec`] documents.
    ///
    /// # Errors
    /// [`Error::Load`] if the object has no such symbol, or does not link.
    pub fn kernel(&self, symbol: &str) -> Result<KernelFn> {
        let name = CString::new(symbol).map_err(|e| Error::Load(e.to_string()))?;
        let mut address = 0;
        // SAFETY: the JIT lives, the name is a C string, `address` receives the result.
        check(unsafe { LLVMOrcLLJITLookup(self.jit, &raw mut address, name.as_ptr()) })?;
        if address == 0 {
            return Err(Error::Load(format!("no kernel `{symbol}`")));
        }
        let code = address as usize as *const ();
        // SAFETY: the address is not null, and every function of an object of kernels has this signature.
        Ok(unsafe { std::mem::transmute::<*const (), KernelFn>(code) })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: made by `LLVMOrcCreateLLJIT`, disposed of once. An error has nowhere to go but its own
        // disposal.
        let _ = check(unsafe { LLVMOrcDisposeLLJIT(self.jit) });
    }
}

fn check(error: LLVMErrorRef) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: the error is not null and consumed here; its message is copied, then freed.
    let text = unsafe {
        let message = LLVMGetErrorMessage(error);
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        LLVMDisposeErrorMessage(message);
        text
    };
    Err(Error::Load(text))
}
