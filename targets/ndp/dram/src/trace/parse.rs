//! Reads requests line by line.

use std::io::{BufRead, Read};

use super::TraceError;
use crate::{Address, Geometry, Kind, Request};

/// Bytes that a line may have, its end included.
const LONGEST: usize = 256;

/// The requests of a trace with their channels, read on demand.
#[derive(Debug)]
pub struct Requests<R> {
    from: R,
    geometry: Geometry,
    line: u64,
    bytes: Vec<u8>,
}

impl<R: BufRead> Requests<R> {
    /// Reads the requests of a text, for a memory of this geometry.
    pub fn new(from: R, geometry: Geometry) -> Self {
        Self { from, geometry, line: 0, bytes: Vec::with_capacity(LONGEST) }
    }

    /// The next request and its channel; `None` at the end.
    fn read(&mut self) -> Result<Option<(usize, Request)>, TraceError> {
        loop {
            self.line += 1;
            let line = self.line;
            self.bytes.clear();
            let mut some = (&mut self.from).take(LONGEST as u64);
            let read = some.read_until(b'\n', &mut self.bytes);
            let read = read.map_err(|source| TraceError::Read { line, source })?;
            if read == 0 {
                return Ok(None);
            }
            if read == LONGEST && self.bytes.last() != Some(&b'\n') {
                return Err(TraceError::Long { line, most: LONGEST });
            }
            let text = String::from_utf8_lossy(&self.bytes);
            if text.trim().is_empty() {
                continue;
            }
            return request(&text, line, &self.geometry).map(Some);
        }
    }
}

impl<R: BufRead> Iterator for Requests<R> {
    type Item = Result<(usize, Request), TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

fn request(text: &str, line: u64, g: &Geometry) -> Result<(usize, Request), TraceError> {
    let mut words = text.split_ascii_whitespace();
    let mut kind = "";
    let mut numbers = [""; 6];
    let mut count = 0;
    for place in std::iter::once(&mut kind).chain(&mut numbers) {
        let Some(word) = words.next() else { break };
        *place = word;
        count += 1;
    }
    count += words.count();
    if count != 7 {
        return Err(TraceError::Words { line, words: count });
    }
    let kind = match kind {
        "R" => Kind::Read,
        "W" => Kind::Write,
        _ => return Err(TraceError::Kind { line, word: kind.to_owned() }),
    };
    let fields = [
        ("channel", g.channels),
        ("rank", g.ranks),
        ("bank group", g.groups),
        ("bank", g.banks),
        ("row", g.rows),
        ("column", g.columns),
    ];
    let mut values = [0; 6];
    for ((value, word), (field, limit)) in values.iter_mut().zip(numbers).zip(fields) {
        let number = word.parse().ok().filter(|&n| n < limit);
        *value = number.ok_or_else(|| TraceError::Number { line, field, word: word.to_owned(), limit })?;
    }
    let [channel, rank, group, bank, row, column] = values;
    Ok((channel as usize, Request { kind, at: Address { rank, group, bank, row, column } }))
}
