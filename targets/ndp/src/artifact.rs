//! The file of a layer: which of its experts DIMMs compute, and the command stream of each.
//!
//! Integers are little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 4 | [`VERSION`] |
//! | 4 | the layer, counted over those with routed experts |
//! | 4 | how many experts follow |
//! | 4 + 4 + 4 + n | of each: its number, its DIMM, n, and the binary form of its stream ([`moec_ndp_isa::encode`]) |
//!
//! Experts are in ascending order, and all streams are for the same machine. The encoding is unique:
//! [`encode`] gives back exactly the bytes that [`decode`] accepts.

use crate::allocation::DimmConfig;
use moec_ir::plan::StreamSet;
use moec_ndp_isa::Stream;
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular;

/// First bytes of the file.
pub const MAGIC: [u8; 8] = *b"moecdimm";
/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Most experts of a layer.
pub const MAX_EXPERTS: u32 = 1 << 12;
/// End of the name of a stream whose expert begins striped over all DIMMs, as experts in a GPU's memory do.
/// It is executed when the expert has been moved to one DIMM.
pub const STRIPED: &str = ".striped";
/// Most bytes of a stream.
pub const MAX_STREAM: u32 = 1 << 20;

/// Computation of a layer in DIMMs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Artifact {
    /// Layer, counted over those with routed experts.
    pub layer: u32,
    /// Its experts in DIMMs, in ascending order of their numbers.
    pub experts: Vec<Placed>,
}

/// One expert in its DIMM, which is that of the stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// Number of the expert in its layer.
    pub expert: u32,
    /// Stream that computes it.
    pub stream: Stream,
}

/// Bytes that are not an artifact, or an artifact that cannot be encoded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ArtifactError {
    /// Other bytes than [`MAGIC`] at the beginning.
    #[error("this is not a file of experts in DIMMs: it does not begin with `moecdimm`")]
    Magic,
    /// Another version.
    #[error("version {0} of experts in DIMMs, but this moec reads {VERSION}: build the bundle again")]
    Version(u32),
    /// The bytes end too early.
    #[error("byte {at}: the file ends inside of {what}; it has been cut off")]
    Truncated {
        /// Offset of its first byte.
        at: usize,
        /// Item that was being read.
        what: &'static str,
    },
    /// Bytes remain after the last expert.
    #[error("byte {at}: {bytes} bytes are left after the last expert")]
    Trailing {
        /// Offset of the first.
        at: usize,
        /// Number of bytes.
        bytes: usize,
    },
    /// A number past its bound.
    #[error("{found} {what}: at most {most} are allowed")]
    TooMany {
        /// Name of the counted things.
        what: &'static str,
        /// Found number.
        found: u64,
        /// Largest allowed number.
        most: u32,
    },
    /// An expert that follows a later one, or is listed twice.
    #[error("expert {expert} is after expert {before}: they must ascend")]
    Order {
        /// The expert.
        expert: u32,
        /// The one before it.
        before: u32,
    },
    /// A stream for another DIMM.
    #[error("expert {expert} is on DIMM {dimm}, but its stream is for DIMM {stream}")]
    Dimm {
        /// The expert.
        expert: u32,
        /// Its DIMM.
        dimm: u32,
        /// The DIMM of its stream.
        stream: u32,
    },
    /// Streams for several machines.
    #[error("the stream of expert {expert} is for {found:?}, but the first one for {first:?}")]
    Dimms {
        /// The expert.
        expert: u32,
        /// Its machine.
        found: DimmConfig,
        /// The machine of the first expert.
        first: DimmConfig,
    },
    /// A stream that cannot be read.
    #[error("the stream of expert {expert}: {what}")]
    Stream {
        /// The expert.
        expert: u32,
        /// Reason.
        what: String,
    },
}

/// The bytes of an artifact.
///
/// # Errors
/// An artifact that [`decode`] would refuse: experts that do not ascend, streams for several machines or
/// without a binary form, or too many of either.
pub fn encode(artifact: &Artifact) -> Result<Vec<u8>, ArtifactError> {
    let count = at_most("experts", artifact.experts.len() as u64, MAX_EXPERTS)?;
    let mut bytes = MAGIC.to_vec();
    for number in [VERSION, artifact.layer, count] {
        bytes.extend(number.to_le_bytes());
    }
    let mut check = Check::default();
    for Placed { expert, stream } in &artifact.experts {
        check.next(*expert, stream)?;
        let form = moec_ndp_isa::encode(stream);
        let length = at_most("bytes of a stream", form.len() as u64, MAX_STREAM)?;
        if moec_ndp_isa::decode(&form).as_ref() != Ok(stream) {
            let what = "it has no binary form".into();
            return Err(ArtifactError::Stream { expert: *expert, what });
        }
        for number in [*expert, stream.dimm, length] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(form);
    }
    Ok(bytes)
}

/// Reads an artifact. Of its streams the form is checked; [`crate::machine::Program::new`] has them verified.
///
/// # Errors
/// Anything but what [`encode`] gives.
pub fn decode(bytes: &[u8]) -> Result<Artifact, ArtifactError> {
    let mut reader = Reader { bytes, at: 0 };
    if bytes.get(..MAGIC.len()) != Some(&MAGIC) {
        return Err(ArtifactError::Magic);
    }
    reader.at = MAGIC.len();
    let version = reader.number("the version")?;
    if version != VERSION {
        return Err(ArtifactError::Version(version));
    }
    let layer = reader.number("the layer")?;
    let count = at_most("experts", reader.number("the number of experts")?.into(), MAX_EXPERTS)?;
    let (mut experts, mut check) = (Vec::new(), Check::default());
    for _ in 0..count {
        let expert = reader.number("an expert")?;
        let dimm = reader.number("a DIMM")?;
        let length =
            at_most("bytes of a stream", reader.number("the length of a stream")?.into(), MAX_STREAM)?;
        let stream = moec_ndp_isa::decode(reader.take(length as usize, "a stream")?)
            .map_err(|error| ArtifactError::Stream { expert, what: error.to_string() })?;
        if stream.dimm != dimm {
            return Err(ArtifactError::Dimm { expert, dimm, stream: stream.dimm });
        }
        check.next(expert, &stream)?;
        experts.push(Placed { expert, stream });
    }
    match bytes.len() - reader.at {
        0 => Ok(Artifact { layer, experts }),
        left => Err(ArtifactError::Trailing { at: reader.at, bytes: left }),
    }
}

/// Reads the streams of a set, and holds them against what the plan says of it.
///
/// # Errors
/// For people: a file that cannot be read, differs from the build, or is not of this set.
pub fn open(bundle: &BundleReader, set: &StreamSet) -> Result<Artifact, String> {
    let bytes = bundle.read(&set.artifact, regular::STREAMS).map_err(|e| e.to_string())?;
    let artifact = decode(&bytes).map_err(|e| e.to_string())?;
    if artifact.experts.is_empty() || !artifact.experts.iter().map(|e| e.expert).eq(0..set.experts) {
        return Err(format!("it has {} experts, and the layer has {}", artifact.experts.len(), set.experts));
    }
    let slots = artifact.experts[0].stream.slots;
    for placed in &artifact.experts {
        let (number, stream) = (placed.expert, &placed.stream);
        moec_ndp_isa::verify(stream).map_err(|e| format!("expert {number}: {e}"))?;
        if stream.slots != slots || stream.regions.is_empty() {
            return Err(format!(
                "expert {number}: its stream is for {} slots, and the first for {slots}",
                stream.slots
            ));
        }
    }
    Ok(artifact)
}

fn at_most(what: &'static str, found: u64, most: u32) -> Result<u32, ArtifactError> {
    let small = u32::try_from(found).ok().filter(|&found| found <= most);
    small.ok_or(ArtifactError::TooMany { what, found, most })
}

/// Checks between experts.
#[derive(Default)]
struct Check {
    before: Option<u32>,
    dimm_config: Option<DimmConfig>,
}

impl Check {
    fn next(&mut self, expert: u32, stream: &Stream) -> Result<(), ArtifactError> {
        if let Some(before) = self.before.replace(expert).filter(|&before| before >= expert) {
            return Err(ArtifactError::Order { expert, before });
        }
        let found = DimmConfig { system: stream.system, geometry: stream.geometry };
        let first = *self.dimm_config.get_or_insert(found);
        if found == first { Ok(()) } else { Err(ArtifactError::Dimms { expert, found, first }) }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize, what: &'static str) -> Result<&'a [u8], ArtifactError> {
        let at = self.at;
        let taken = at.checked_add(bytes).and_then(|end| self.bytes.get(at..end));
        self.at += taken.map_or(0, <[u8]>::len);
        taken.ok_or(ArtifactError::Truncated { at, what })
    }

    fn number(&mut self, what: &'static str) -> Result<u32, ArtifactError> {
        let at = self.at;
        let bytes = self.take(4, what)?;
        bytes.try_into().map(u32::from_le_bytes).map_err(|_| ArtifactError::Truncated { at, what })
    }
}
