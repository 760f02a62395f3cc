//! The signal handler. It allocates nothing, takes no lock and touches only this thread's tiles.

use super::EmulateError;
use super::decode::{Base, LONGEST, Memory, Op, Unknown, decode};
use super::tiles::{CONFIG_BYTES, Fault, Tiles};
use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

thread_local! {
    /// This thread's tiles. Constant and without a destructor, so that the handler's access is an address.
    static TILES: UnsafeCell<Tiles> = const { UnsafeCell::new(Tiles::INIT) };
}

/// Previous handler of illegal instructions.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Bytes of the smallest page.
const PAGE: usize = 4096;

/// Indices of the general registers in a signal's context, by their numbers in encodings.
const REGISTERS: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Emulates from now on, in every thread; again is harmless.
///
/// # Errors
/// [`EmulateError::Handler`] if the operating system refuses.
pub fn install() -> Result<(), EmulateError> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _one = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let failed = || EmulateError::Handler(io::Error::last_os_error());
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: with no new action this only writes the old one to `before`, which a zeroed one is valid for.
    let before = unsafe {
        if libc::sigaction(libc::SIGILL, ptr::null(), before.as_mut_ptr()) != 0 {
            return Err(failed());
        }
        before.assume_init()
    };
    // The old one must be known before the handler can run. The answer is remembered by the standard
    // library: requested here, the handler only reads it.
    let _ = BEFORE.set(before);
    let _ = std::arch::is_x86_feature_detected!("avx512f");
    // The same holds for the decoder's tables.
    let _ = decode(&[]);
    // SAFETY: all-zero is a valid action; the handler has the signature that `SA_SIGINFO` promises and
    // does nothing that a signal handler must not.
    let refused = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_illegal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGILL, &raw const action, ptr::null_mut()) != 0
    };
    if refused { Err(failed()) } else { Ok(()) }
}

unsafe extern "C" fn on_illegal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: `SA_SIGINFO` promises a `ucontext_t` that is this handler's alone until it returns.
    let context_of = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    // SAFETY: the registers are those of an instruction that this CPU has refused.
    if unsafe { step(&mut context_of.uc_mcontext.gregs) }.is_err() {
        // SAFETY: exactly the handler that the operating system has given.
        unsafe { pass_on(signal, info, context) };
    }
}

/// Executes the instruction at the instruction pointer, if it is one of ours.
///
/// # Safety
/// The registers must be those of a thread that is about to execute it: its operands in memory are then
/// accessed as the instruction would.
unsafe fn step(registers: &mut [libc::greg_t; 23]) -> Result<(), Fault> {
    let at = registers[libc::REG_RIP as usize] as usize;
    // SAFETY: the CPU has read the instruction from there. Pages are readable as a whole, and the next one is
    // read only if the instruction reaches into it.
    let bytes = |count: usize| unsafe { std::slice::from_raw_parts(at as *const u8, count) };
    let found = match decode(bytes(LONGEST.min(PAGE - at % PAGE))) {
        Err(Unknown::Truncated) => decode(bytes(LONGEST)),
        found => found,
    };
    let (op, length) = found.map_err(|_| Fault)?;
    let register = |number: u8| registers[REGISTERS[usize::from(number & 15)] as usize] as usize;
    let start = |m: Memory| {
        let base = match m.base {
            Base::None => 0,
            Base::Reg(number) => register(number),
            Base::Next => at + length,
        };
        base.wrapping_add(m.disp as usize)
    };
    let stride = |m: Memory| m.index.map_or(0, |(number, scale)| register(number) << scale);
    TILES.with(|tiles| {
        // SAFETY: only this handler uses the thread's tiles, and it runs no instruction that traps here.
        let tiles = unsafe { &mut *tiles.get() };
        match op {
            Op::Release => {
                tiles.release();
                Ok(())
            }
            Op::Zero(tile) => tiles.zero(tile),
            Op::Dot(dot, operands) => tiles.dot(dot, operands),
            Op::LoadConfig(m) => {
                let from = start(m).wrapping_add(stride(m)) as *const [u8; CONFIG_BYTES];
                // SAFETY: the instruction reads 64 bytes there, of any alignment.
                let config = unsafe { from.read_unaligned() };
                tiles.configure(&config)
            }
            Op::StoreConfig(m) => {
                let to = start(m).wrapping_add(stride(m)) as *mut [u8; CONFIG_BYTES];
                // SAFETY: the instruction writes 64 bytes there, of any alignment.
                unsafe { to.write_unaligned(tiles.configuration()) };
                Ok(())
            }
            // SAFETY: the instruction reads these rows.
            Op::Load(tile, m) => unsafe { tiles.load(tile, start(m), stride(m)) },
            // SAFETY: the instruction writes these rows.
            Op::Store(tile, m) => unsafe { tiles.store(tile, start(m), stride(m)) },
        }
    })?;
    registers[libc::REG_RIP as usize] = (at + length) as libc::greg_t;
    Ok(())
}

/// Passes the signal to the previous handler.
///
/// # Safety
/// The arguments must be those of a signal that is being handled.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return };
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // The instruction traps again when this returns, and then ends the process.
            // SAFETY: all-zero with the default handler is a valid action.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            type Handler = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: that action was set with `SA_SIGINFO`, so its handler has this signature.
            unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) };
        }
        handler => {
            type Handler = unsafe extern "C" fn(libc::c_int);
            // SAFETY: that action was set without `SA_SIGINFO`, so its handler has this signature.
            unsafe { std::mem::transmute::<usize, Handler>(handler)(signal) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::arch::asm;

    #[repr(align(64))]
    struct Aligned<T>(T);

    fn config() -> Aligned<[u8; 64]> {
        let mut c = Aligned([0; 64]);
        c.0[0] = 1;
        c.0[16] = 64; // tile 0: 2 rows of 64 bytes
        c.0[48] = 2;
        c.0[18] = 8; // tile 1: 2 rows of 8 bytes
        c.0[49] = 2;
        c.0[20] = 64; // tile 2: 2 rows of 64 bytes
        c.0[50] = 2;
        c
    }

    /// `out[m][n] = Σ a[m][k] · b[k][n]` over two quads, through real instructions.
    fn product(a: &[[u8; 8]; 2], b: &[[u8; 64]; 2]) -> [[i32; 16]; 2] {
        install().unwrap();
        let mut out = [[-1; 16]; 2];
        let config = config();
        // SAFETY: the configuration gives the tiles exactly the extents of the operands; without AMX the
        // instructions are emulated.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0",
                "tileloadd tmm1, [{a} + {a_ld}]",
                "tileloadd tmm2, [{b} + {b_ld}*8]",
                "tdpbsud tmm0, tmm1, tmm2",
                "tilestored [{out} + {b_ld}*8], tmm0",
                "tilerelease",
                config = in(reg) &raw const config,
                a = in(reg) a,
                a_ld = in(reg) 8usize,
                b = in(reg) b,
                b_ld = in(reg) 8usize,
                out = in(reg) &raw mut out,
            );
        }
        out
    }

    #[test]
    fn tile_state_is_per_thread() {
        // If there are tiles, the operating system must grant their use first.
        let _ = moec_runtime::platform::cpu::missing(&["amx-tile"]);
        std::thread::scope(|scope| {
            for t in 0..4u8 {
                scope.spawn(move || {
                    let a = std::array::from_fn(|m| std::array::from_fn(|k| (m + k) as u8 | t << 6));
                    let b = std::array::from_fn(|k| std::array::from_fn(|n| (3 * n + k) as u8 ^ t));
                    for _ in 0..20 {
                        let out = product(&a, &b);
                        for (m, row) in out.iter().enumerate() {
                            for (n, &sum) in row.iter().enumerate() {
                                let term = |k: usize| {
                                    i32::from(a[m][k].cast_signed()) * i32::from(b[k / 4][4 * n + k % 4])
                                };
                                assert_eq!(sum, (0..8).map(term).sum::<i32>(), "{t}: {m}, {n}");
                            }
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn foreign_traps_reach_the_previous_handler() {
        // An earlier handler, which skips `ud2` and counts.
        static SKIPPED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        unsafe extern "C" fn skip(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
            SKIPPED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // SAFETY: the operating system gives a `ucontext_t`.
            unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] += 2 };
        }
        // In a separate process, since signal handlers belong to the whole process.
        if std::env::var_os("MOEC_TEST_PASS_ON").is_none() {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "emulate::trap::tests::foreign_traps_reach_the_previous_handler",
                    "--nocapture",
                ])
                .env("MOEC_TEST_PASS_ON", "1")
                .status()
                .unwrap();
            assert!(status.success());
            return;
        }
        // SAFETY: all-zero is a valid action, and the handler has the signature of `SA_SIGINFO`.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = skip as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &raw const action, ptr::null_mut()), 0);
        }
        install().unwrap();
        // SAFETY: the handlers skip `ud2` and execute the tile instruction.
        unsafe { asm!("ud2", "tilerelease", "ud2") };
        assert_eq!(SKIPPED.load(std::sync::atomic::Ordering::Relaxed), 2);
    }

    #[test]
    fn trap_without_another_handler_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        if std::env::var_os("MOEC_TEST_END").is_none() {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "emulate::trap::tests::trap_without_another_handler_ends_the_process"])
                .env("MOEC_TEST_END", "1")
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .status()
                .unwrap();
            assert_eq!(status.signal(), Some(libc::SIGILL));
            return;
        }
        install().unwrap();
        // SAFETY: no tile is configured, so this is `#UD` on every CPU.
        unsafe { asm!("tilerelease", "tilezero tmm0") };
    }
}
