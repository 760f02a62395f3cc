//! Commands to a host, and their form in a message: one after the other, numbers little-endian.
//!
//! | command | words of 64 bits, after its number | then |
//! |---|---|---|
//! | 1, `write` | offset, bytes | the bytes, zeros up to the next word |
//! | 2, `execute` | entry point, step, rows, tokens of the longest sequence | |
//! | 3, `read` | offset, bytes | |
//! | 4, `greet` | bytes | the name of the program, zeros up to the next word |
//! | 5, `leave` | | |
//! | 6, `zero` | offset, bytes | |
//! | 7, `copy` | first offset, second offset, bytes | |
//! | 8, `disk` | | |
//!
//! A message with a `read`, a `greet`, a `leave` or a `disk` has an answer: 0 and the bytes that were read, of a `greet` the
//! name of the machine, of a `disk` words of 64 bits; or 1 and the text of an error.

use moec_runtime::exec::traffic::HostReads;
use moec_runtime::{Error, Result};

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Bytes for a place of the unit's memory.
    Write {
        /// Offset of the place.
        offset: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// A step of the unit.
    Execute {
        /// Entry point.
        entry: u32,
        /// Step in it.
        step: u32,
        /// Rows.
        rows: u64,
        /// Tokens of the longest sequence of the call.
        seq_len: u64,
    },
    /// Bytes of a place for the answer.
    Read {
        /// Offset of the place.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// Begin of a connection: both ends must have the same program.
    Greet {
        /// Name of the first host's program.
        program: &'a [u8],
    },
    /// End of the connection.
    Leave,
    /// Zeros for a place: a state begins again.
    Zero {
        /// Offset of the place.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// Bytes of a place for another one: a snapshot of a state, or its way back.
    Copy {
        /// Offset of the bytes.
        from: u64,
        /// Offset of the place that they are for.
        to: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// Experts that the host has read from its disk so far, for the answer: the numbers of a [`HostReads`].
    Disk,
}

/// Bytes of a word.
const WORD: usize = 8;

/// Commands in the form of a message.
#[derive(Debug, Default)]
pub struct Message {
    bytes: Vec<u8>,
    /// Bytes that its answer has after its first word.
    answer: u64,
}

impl Message {
    /// Whether there is no command.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The message.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes of data in the answer, if all goes well.
    pub fn answer(&self) -> u64 {
        self.answer
    }

    /// Takes all commands out.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.answer = 0;
    }

    fn words(&mut self, words: &[u64]) {
        for word in words {
            self.bytes.extend(word.to_le_bytes());
        }
    }

    fn data(&mut self, data: &[u8]) {
        self.words(&[data.len() as u64]);
        self.bytes.extend(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(WORD), 0);
    }

    /// Adds a command.
    pub fn add(&mut self, command: Command<'_>) {
        match command {
            Command::Write { offset, data } => {
                self.words(&[1, offset]);
                self.data(data);
            }
            Command::Execute { entry, step, rows, seq_len } => {
                self.words(&[2, u64::from(entry), u64::from(step), rows, seq_len]);
            }
            Command::Read { offset, bytes } => {
                self.words(&[3, offset, bytes]);
                self.answer += bytes;
            }
            Command::Greet { program } => {
                self.words(&[4]);
                self.data(program);
            }
            Command::Leave => self.words(&[5]),
            Command::Disk => self.words(&[8]),
            Command::Zero { offset, bytes } => self.words(&[6, offset, bytes]),
            Command::Copy { from, to, bytes } => self.words(&[7, from, to, bytes]),
        }
    }
}

/// Reader of the commands of a message.
#[derive(Debug)]
pub struct Commands<'a>(&'a [u8]);

impl<'a> Commands<'a> {
    /// The commands of a message.
    pub const fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<WORD>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn data(&mut self) -> Option<&'a [u8]> {
        let bytes = usize::try_from(self.word()?).ok()?;
        let padded = bytes.checked_next_multiple_of(WORD)?;
        let (data, rest) = self.0.split_at_checked(padded)?;
        self.0 = rest;
        data.get(..bytes)
    }

    fn command(&mut self) -> Option<Command<'a>> {
        let small = |word: u64| u32::try_from(word).ok();
        Some(match self.word()? {
            1 => Command::Write { offset: self.word()?, data: self.data()? },
            2 => Command::Execute {
                entry: small(self.word()?)?,
                step: small(self.word()?)?,
                rows: self.word()?,
                seq_len: self.word()?,
            },
            3 => Command::Read { offset: self.word()?, bytes: self.word()? },
            4 => Command::Greet { program: self.data()? },
            5 => Command::Leave,
            6 => Command::Zero { offset: self.word()?, bytes: self.word()? },
            7 => Command::Copy { from: self.word()?, to: self.word()?, bytes: self.word()? },
            8 => Command::Disk,
            _ => return None,
        })
    }
}

impl<'a> Iterator for Commands<'a> {
    type Item = Result<Command<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let command = self.command();
        if command.is_none() {
            self.0 = &[];
        }
        Some(command.ok_or_else(|| Error::Bundle("a message of another version, or damaged".to_owned())))
    }
}

/// An answer in the form of a message.
#[derive(Debug)]
pub struct Answer(Vec<u8>);

impl Default for Answer {
    fn default() -> Self {
        Self(vec![0; WORD])
    }
}

impl Answer {
    /// Takes all data out.
    pub fn clear(&mut self) {
        self.begin(0);
    }

    /// Adds data.
    pub fn add(&mut self, data: &[u8]) {
        self.0.extend_from_slice(data);
    }

    /// Says an error in place of the data.
    pub fn refuse(&mut self, e: &Error) {
        self.begin(1);
        self.add(e.to_string().as_bytes());
    }

    /// The message.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn begin(&mut self, status: u64) {
        self.0.clear();
        self.add(&status.to_le_bytes());
    }
}

/// The data of an answer to [`Command::Disk`].
pub fn reads_data(reads: HostReads) -> Vec<u8> {
    reads.numbers().into_iter().flat_map(u64::to_le_bytes).collect()
}

/// The numbers of such data; `None` if they have another length.
pub fn reads_of(data: &[u8]) -> Option<HostReads> {
    let (words, rest) = data.as_chunks::<WORD>();
    let numbers: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    numbers.try_into().ok().filter(|_| rest.is_empty()).map(HostReads::of_numbers)
}

/// The data of an answer, or the text of an error.
pub fn answered(message: &[u8]) -> std::result::Result<&[u8], String> {
    match message.split_first_chunk::<WORD>() {
        Some((status, data)) if u64::from_le_bytes(*status) == 0 => Ok(data),
        Some((_, text)) => Err(String::from_utf8_lossy(text).into_owned()),
        None => Err("an answer without a status".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_as_they_were_written() {
        let commands = [
            Command::Greet { program: b"abc" },
            Command::Write { offset: 64, data: &[1, 2, 3, 4, 5, 6, 7, 8, 9] },
            Command::Execute { entry: 1, step: 7, rows: 3, seq_len: 12 },
            Command::Read { offset: 128, bytes: 4 },
            Command::Zero { offset: 64, bytes: 256 },
            Command::Copy { from: 64, to: 1024, bytes: 32 },
            Command::Disk,
            Command::Leave,
        ];
        let mut message = Message::default();
        for command in commands {
            message.add(command);
        }
        let read: Vec<_> = Commands::of(message.bytes()).map(|c| c.unwrap()).collect();
        assert_eq!(read, commands);
        assert_eq!(message.answer(), 4);
        // A message that is cut off is an error, wherever that is.
        for end in 1..message.bytes().len() {
            let read: Vec<_> = Commands::of(&message.bytes()[..end]).collect();
            assert!(read.iter().any(Result::is_err) || end % WORD == 0, "{end}");
        }
        assert!(Commands::of(&9_u64.to_le_bytes()).next().unwrap().is_err());
    }

    #[test]
    fn answers_are_data_or_errors() {
        let mut answer = Answer::default();
        assert_eq!(answered(answer.bytes()), Ok(&[][..]));
        answer.add(&[1]);
        answer.add(&[2]);
        assert_eq!(answered(answer.bytes()), Ok(&[1, 2][..]));
        answer.refuse(&Error::Bundle("no".to_owned()));
        assert!(answered(answer.bytes()).unwrap_err().contains("no"));
        answer.clear();
        assert_eq!(answered(answer.bytes()), Ok(&[][..]));
        assert!(answered(&[0; 3]).is_err());
        let reads = HostReads { bytes: 1, reads: 2, hits: 3, misses: 4 };
        assert_eq!(reads_of(&reads_data(reads)), Some(reads));
        assert_eq!(reads_of(&reads_data(reads)[1..]), None);
    }
}
