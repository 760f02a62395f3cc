//! The chips that graphs are compiled for.

/// A chip with a Hexagon tensor processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Soc {
    /// Name of the chip in moec's targets.
    pub name: &'static str,
    /// Qualcomm's part number.
    pub part: &'static str,
    /// QNN's number of the model (`soc_model`, in Qualcomm's table of supported Snapdragon devices).
    pub model: u32,
    /// Version of the Hexagon architecture: 75 for v75.
    pub arch: u32,
    /// Memory beside the tensor unit (VTCM), in MiB.
    pub vtcm: u32,
}

/// Snapdragon 8 Gen 3: the phone OnePlus 12 of PowerInfer-2's evaluation (§7.1).
pub const SNAPDRAGON_8_GEN_3: Soc =
    Soc { name: "snapdragon-8-gen-3", part: "SM8650", model: 57, arch: 75, vtcm: 8 };
/// Snapdragon 8+ Gen 1: the phone OnePlus Ace 2 of PowerInfer-2's evaluation (§7.1).
pub const SNAPDRAGON_8_PLUS_GEN_1: Soc =
    Soc { name: "snapdragon-8-plus-gen-1", part: "SM8475", model: 42, arch: 69, vtcm: 8 };

/// All that are known here.
pub const SOCS: [Soc; 2] = [SNAPDRAGON_8_GEN_3, SNAPDRAGON_8_PLUS_GEN_1];

impl Soc {
    /// The chip of that name, as moec's targets are called.
    pub fn named(name: &str) -> Option<Self> {
        SOCS.into_iter().find(|soc| soc.name == name)
    }

    /// The chip of that number.
    pub fn numbered(model: u32) -> Option<Self> {
        SOCS.into_iter().find(|soc| soc.model == model)
    }
}
