//! Messages of any length: their length, then parts of bounded size.

use crate::wire::{Tag, Wire};
use moec_runtime::{Error, Result};
use std::time::Duration;

/// Bytes of a part. A slow network carries it within the time in which a message must arrive whole.
const PART: usize = 16 << 20;

/// Sends a message in parts. If the other host does not take a part in this time, the job ends.
///
/// # Errors
/// A host that cannot be reached.
pub fn send_whole(wire: &dyn Wire, to: usize, tag: Tag, message: &[u8], wait: Duration) -> Result<()> {
    wire.send(to, tag, &(message.len() as u64).to_le_bytes(), wait)?;
    message.chunks(PART).try_for_each(|part| wire.send(to, tag, part, wait))
}

/// Receives a message in parts; `next` receives one of them.
///
/// # Errors
/// Those of `next`, and parts of another length than announced.
pub fn receive_whole(mut next: impl FnMut(&mut Vec<u8>) -> Result<()>) -> Result<Vec<u8>> {
    let mut part = Vec::new();
    let damaged = || Error::Bundle("a message of another version, or damaged".to_owned());
    next(&mut part)?;
    let announced = part.as_slice().try_into().map_err(|_| damaged())?;
    let bytes = usize::try_from(u64::from_le_bytes(announced)).map_err(|_| damaged())?;
    let mut message = Vec::new();
    while message.len() < bytes {
        next(&mut part)?;
        if part.is_empty() || part.len() > bytes - message.len() {
            return Err(damaged());
        }
        message.extend_from_slice(&part);
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Keeps what is sent.
    #[derive(Debug, Default)]
    struct Sent(Mutex<Vec<Vec<u8>>>);

    impl Wire for Sent {
        fn rank(&self) -> usize {
            1
        }

        fn hosts(&self) -> usize {
            2
        }

        fn send(&self, _to: usize, _tag: Tag, bytes: &[u8], _wait: Duration) -> Result<()> {
            self.0.lock().unwrap().push(bytes.to_vec());
            Ok(())
        }

        fn receive(&self, _from: usize, _tag: Tag, _wait: Duration, _message: &mut Vec<u8>) -> Result<bool> {
            Ok(false)
        }

        fn end_job(&self, why: &Error) -> ! {
            panic!("{why}")
        }
    }

    #[test]
    fn long_messages_arrive_whole_and_damaged_ones_are_refused() {
        for bytes in [0, 1, PART, 2 * PART + 7] {
            let message: Vec<u8> = (0..bytes).map(|i| (i * 7 % 251) as u8).collect();
            let wire = Sent::default();
            send_whole(&wire, 0, Tag::Answer, &message, Duration::ZERO).unwrap();
            let parts = wire.0.into_inner().unwrap();
            assert!(parts.iter().all(|part| part.len() <= PART));
            let receive = |parts: Vec<Vec<u8>>| {
                let mut parts = parts.into_iter();
                receive_whole(|part| {
                    *part = parts.next().unwrap_or_default();
                    Ok(())
                })
            };
            assert!(receive(parts.clone()).unwrap() == message);
            assert!(bytes == 0 || receive(parts[..parts.len() - 1].to_vec()).is_err());
            assert!(receive(parts.into_iter().rev().collect()).is_err() || bytes == 0);
        }
    }
}
