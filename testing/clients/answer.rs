//! An answer of either endpoint, whole or from events.

use moec_testing::http::Reply;
use serde_json::Value;

/// Rows that are computed together are summed in another order than a single row, which changes the last bits
/// of later values. If the token differs from that of a single run, its log-probability there may be lower by
/// at most this, in nats.
pub(crate) const GAP: f64 = 0.125;

/// Answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    /// All of it.
    pub(crate) text: String,
    /// Its tokens, where log-probabilities were requested.
    pub(crate) tokens: Vec<String>,
    /// For each token, possible alternatives, and how much less likely they were, in nats.
    pub(crate) others: Vec<Vec<(String, f64)>>,
    /// Reason that it ended.
    pub(crate) finish: String,
}

impl Answer {
    /// Reads the only choice of a reply.
    pub(crate) fn of(reply: &Reply, stream: bool) -> Result<Self, String> {
        let mut answer = Self::default();
        let parsed = |text: &str| serde_json::from_str(text).map_err(|e| format!("{e}: {text}"));
        if stream {
            let events = reply.events().ok_or_else(|| format!("the stream is cut: {}", reply.body))?;
            for event in events {
                answer.take(&parsed(event)?)?;
            }
        } else {
            answer.take(&parsed(&reply.body)?)?;
        }
        Ok(answer)
    }

    /// Place of the first difference to the answer of a single run, and how much less likely that run found
    /// the token here, in nats; `None` if the two are equal. Later tokens cannot be compared.
    ///
    /// # Errors
    /// They differ by more than rounding ([`GAP`]).
    pub(crate) fn leaves(&self, alone: &Self) -> Result<Option<(usize, f64)>, String> {
        let Some(place) = alone.tokens.iter().zip(&self.tokens).position(|(a, b)| a != b) else {
            let equal =
                (&self.text, &self.tokens, &self.finish) == (&alone.text, &alone.tokens, &alone.finish);
            return if equal {
                Ok(None)
            } else {
                Err(format!("{:?} in place of {:?}", self.text, alone.text))
            };
        };
        let found = &self.tokens[place];
        let others = alone.others.get(place).into_iter().flatten();
        match others.into_iter().find(|(other, _)| other == found) {
            Some(&(_, gap)) if gap <= GAP => Ok(Some((place, gap))),
            gap => Err(format!("token {place} is {found:?} in place of {:?}: {gap:?}", alone.tokens[place])),
        }
    }

    /// Appends what an object says.
    fn take(&mut self, object: &Value) -> Result<(), String> {
        if object.get("error").is_some() {
            return Err(object.to_string());
        }
        let choice = &object["choices"][0];
        let texts = [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]];
        texts.iter().filter_map(|t| t.as_str()).for_each(|t| self.text.push_str(t));
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let of = &choice["logprobs"];
        self.tokens.extend(list(&of["tokens"]).iter().map(word));
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NEG_INFINITY);
        for (chosen, top) in list(&of["token_logprobs"]).iter().zip(list(&of["top_logprobs"])) {
            let top = top.as_object().cloned().unwrap_or_default();
            self.others.push(top.iter().map(|(t, p)| (t.clone(), number(chosen) - number(p))).collect());
        }
        for token in list(&of["content"]) {
            self.tokens.push(word(&token["token"]));
            let difference =
                |t: &Value| (word(&t["token"]), number(&token["logprob"]) - number(&t["logprob"]));
            self.others.push(list(&token["top_logprobs"]).iter().map(difference).collect());
        }
        if let Some(finish) = choice["finish_reason"].as_str() {
            finish.clone_into(&mut self.finish);
        }
        Ok(())
    }
}
