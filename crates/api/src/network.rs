//! What a sandbox may reach.

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use utoipa::ToSchema;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Egress {
    /// Every public address. Private ones only where the server's operator allows them.
    #[default]
    Internet,
    /// Only what `allow` names. Names are not resolved.
    None,
}

/// First `deny` is asked, then `allow`, then `egress`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NetworkPolicy {
    pub egress: Egress,
    /// `CIDR` or `CIDR:PORT`.
    pub allow: Vec<String>,
    /// `CIDR` or `CIDR:PORT`.
    pub deny: Vec<String>,
    /// Megabits in a second, in each direction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limit_mbit: Option<u32>,
}

/// Fields may be missing or null. Unknown ones are refused: a misspelt rule would leave a hole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateNetwork {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// `CIDR` or `CIDR:PORT`, at most 64. Private ranges only within what the server's operator permits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow: Option<Vec<String>>,
    /// `CIDR` or `CIDR:PORT`, at most 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny: Option<Vec<String>>,
    /// Megabits in a second, in each direction; 0 is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limit_mbit: Option<u32>,
}

/// `true` is the internet, `false` nothing at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum CreateNetwork {
    Internet(bool),
    Policy(UpdateNetwork),
}

impl From<CreateNetwork> for UpdateNetwork {
    fn from(network: CreateNetwork) -> Self {
        let egress = |egress| Self { egress: Some(egress), ..Self::default() };
        match network {
            CreateNetwork::Internet(true) => egress(Egress::Internet),
            CreateNetwork::Internet(false) => egress(Egress::None),
            CreateNetwork::Policy(policy) => policy,
        }
    }
}

// By hand, since the derived one tells neither which field is wrong nor how.
impl<'de> Deserialize<'de> for CreateNetwork {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = CreateNetwork;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a boolean or an object")
            }

            fn visit_bool<E>(self, internet: bool) -> Result<CreateNetwork, E> {
                Ok(CreateNetwork::Internet(internet))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CreateNetwork, A::Error> {
                UpdateNetwork::deserialize(MapAccessDeserializer::new(map))
                    .map(CreateNetwork::Policy)
            }
        }

        deserializer.deserialize_any(Either)
    }
}

/// A sandbox's policy, and what went over its network. Bytes are counted with their frames' headers; the names it
/// asked the gateway for are not among them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Network {
    #[serde(flatten)]
    pub policy: NetworkPolicy,
    /// By the sandbox, since it was created.
    pub sent_bytes: u64,
    pub received_bytes: u64,
}
