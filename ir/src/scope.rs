//! Place of a node in the model: its layer, and its part of the layer.

use bincode::de::{Decode, Decoder};
use bincode::enc::{Encode, Encoder};
use bincode::error::{DecodeError, EncodeError};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Name of a part: letters, digits and `_`, no leading digit. The set is open: an importer may add names. Its
/// [`Role`] says what a part is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Part(Cow<'static, str>);

/// Role of a part: what it computes, by which units are assigned and costs are counted. Parts of several
/// names may have one role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Attention: reads a cached row of every earlier token.
    Attention,
    /// Another mixer of tokens, which folds them into a state of fixed size: a delta rule, a state space, a
    /// short convolution.
    Mixer,
    /// Feed-forward network: dense, shared, or a mixture of experts with its router.
    Network,
    /// Final norm and language-model head.
    Head,
    /// Everything else: the embedding, and parts of unknown names.
    Other,
}

impl Role {
    /// Whether it mixes tokens: attention or another mixer.
    pub const fn mixes_tokens(self) -> bool {
        matches!(self, Self::Attention | Self::Mixer)
    }
}

/// Roles of parts. One that is not here is [`Role::Other`].
const ROLES: [(Part, Role); 5] = [
    (Part::ATTN, Role::Attention),
    (Part::MIXER, Role::Mixer),
    (Part::FFN, Role::Network),
    (Part::SHARED, Role::Network),
    (Part::HEAD, Role::Head),
];

/// Begins of the names of parts that are slices: of experts, and of the heads of attention.
const SLICES: [(&str, Role); 2] = [("slice_", Role::Network), ("heads_", Role::Attention)];

impl Part {
    /// Embedding, and what all layers share.
    pub const EMBED: Self = Self::new("embed");
    /// Attention, its norm and its residual.
    pub const ATTN: Self = Self::new("attn");
    /// A mixer of tokens that folds them into a state: linear attention, its norm and its residual.
    pub const MIXER: Self = Self::new("mixer");
    /// Feed-forward network or mixture of experts, its norm and its residual.
    pub const FFN: Self = Self::new("ffn");
    /// The expert that every token takes.
    pub const SHARED: Self = Self::new("shared");
    /// Final norm and language-model head.
    pub const HEAD: Self = Self::new("head");

    /// The part of that name.
    ///
    /// # Panics
    /// The name is not of the form that [`Part`] states. In a constant that is an error of compilation.
    pub const fn new(name: &'static str) -> Self {
        assert!(is_name(name), "a part is named by letters, digits and `_`");
        Self(Cow::Borrowed(name))
    }

    /// A slice of a layer's experts.
    pub fn of_slice(index: u32) -> Self {
        Self(Cow::Owned(format!("{}{index}", SLICES[0].0)))
    }

    /// A slice of the heads of a layer's attention.
    pub fn of_heads(index: u32) -> Self {
        Self(Cow::Owned(format!("{}{index}", SLICES[1].0)))
    }

    /// Index of the slice of a layer's experts or heads that it is.
    pub fn slice(&self) -> Option<u32> {
        self.sliced().map(|(index, _)| index)
    }

    /// Index and role of the slice that it is.
    fn sliced(&self) -> Option<(u32, Role)> {
        SLICES.iter().find_map(|(begin, role)| Some((self.0.strip_prefix(begin)?.parse().ok()?, *role)))
    }

    /// Its role.
    pub fn role(&self) -> Role {
        if let Some((_, role)) = self.sliced() {
            return role;
        }
        ROLES.iter().find(|(part, _)| part == self).map_or(Role::Other, |&(_, role)| role)
    }

    /// Its name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

const fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        if !(bytes[i].is_ascii_alphabetic() || bytes[i] == b'_' || (i > 0 && bytes[i].is_ascii_digit())) {
            return false;
        }
        i += 1;
    }
    !bytes.is_empty()
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Place of a node: in a layer (`layers.3.attn`) or outside of them (`embed`, `head`).
///
/// The text form of the default is empty: it is at no particular place. `L` is [`AnyLayer`], for statements
/// about all layers at once.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope<L = u32> {
    /// Layer, counted from 0; `None` outside of the layers.
    pub layer: Option<L>,
    /// Part of the layer, or of the model.
    pub part: Part,
}

/// The layer of what is alike in all of them; its text form is `*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AnyLayer;

/// A text that is not a scope.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected a scope, `PART` or `layers.LAYER.PART`, found {0:?}")]
pub struct MalformedScope(String);

impl Scope {
    /// A part of a layer.
    pub const fn in_layer(layer: u32, part: Part) -> Self {
        Self { layer: Some(layer), part }
    }

    /// This part of all layers; itself outside of them.
    pub fn any_layer(&self) -> Scope<AnyLayer> {
        Scope { layer: self.layer.map(|_| AnyLayer), part: self.part.clone() }
    }
}

impl<L> Scope<L> {
    /// Role of its part.
    pub fn role(&self) -> Role {
        self.part.role()
    }
}

impl<L> Default for Scope<L> {
    fn default() -> Self {
        Part::default().into()
    }
}

impl<L> From<Part> for Scope<L> {
    fn from(part: Part) -> Self {
        Self { layer: None, part }
    }
}

impl fmt::Display for AnyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("*")
    }
}

impl FromStr for AnyLayer {
    type Err = MalformedScope;

    fn from_str(text: &str) -> Result<Self, MalformedScope> {
        if text == "*" { Ok(Self) } else { Err(MalformedScope(text.to_owned())) }
    }
}

impl<L: fmt::Display> fmt::Display for Scope<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.layer, self.part.as_str()) {
            (None, part) => f.write_str(part),
            (Some(layer), "") => write!(f, "layers.{layer}"),
            (Some(layer), part) => write!(f, "layers.{layer}.{part}"),
        }
    }
}

impl<L: fmt::Display + FromStr> FromStr for Scope<L> {
    type Err = MalformedScope;

    fn from_str(text: &str) -> Result<Self, MalformedScope> {
        let malformed = || MalformedScope(text.to_owned());
        let (layer, part) = match text.strip_prefix("layers.") {
            Some(inside) => {
                let (layer, part) = inside.split_once('.').unwrap_or((inside, ""));
                (Some(layer.parse().map_err(|_| malformed())?), part)
            }
            None => (None, text),
        };
        if !part.is_empty() && !is_name(part) {
            return Err(malformed());
        }
        let scope = Self { layer, part: Part(Cow::Owned(part.to_owned())) };
        // One text for each scope: no `layers.03.attn`, and no point without a part after it.
        if scope.to_string() == text { Ok(scope) } else { Err(malformed()) }
    }
}

/// Binary form: the text.
impl Encode for Scope<AnyLayer> {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.to_string().encode(encoder)
    }
}

impl<C> Decode<C> for Scope<AnyLayer> {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let text = String::decode(decoder)?;
        text.parse().map_err(|e: MalformedScope| DecodeError::OtherString(e.to_string()))
    }
}

bincode::impl_borrow_decode!(Scope<AnyLayer>);
