//! The settings file: plans by name, and prices.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use api::AccountId;
use serde::Deserialize;

use super::{Limits, Plan};
use crate::db::AccountRow;

const UNLIMITED: &str = "unlimited";

/// Told to the person who starts the server.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("cannot read {path}")]
    Read { path: String, source: std::io::Error },
    /// The parser shows the line.
    #[error("{path} is no settings file:\n{problem}")]
    Text { path: String, problem: String },
    #[error("{path}: {problem}")]
    Rule { path: String, problem: String },
}

/// All plans there are, and what use costs.
#[derive(Debug, Clone)]
pub struct Plans {
    plans: BTreeMap<String, Arc<Plan>>,
    default: Arc<Plan>,
    pub(crate) prices: Option<Prices>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Prices {
    pub(crate) currency: String,
    #[serde(default)]
    pub(crate) volume_gb_month: f64,
    #[serde(default)]
    pub(crate) snapshot_gb_month: f64,
    #[serde(default)]
    pub(crate) vcpu_hour: f64,
    #[serde(default)]
    pub(crate) memory_gb_hour: f64,
    #[serde(default)]
    pub(crate) egress_gb: f64,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    default_plan: Option<String>,
    #[serde(default)]
    plans: BTreeMap<String, Limits>,
    prices: Option<Prices>,
}

impl Default for Plans {
    fn default() -> Self {
        Self::of(Text::default()).expect("the plans that come with the server follow the rules")
    }
}

impl Plans {
    /// # Errors
    /// Says where the file is wrong.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        let shown = path.display().to_string();
        let text = fs::read_to_string(path)
            .map_err(|source| SettingsError::Read { path: shown.clone(), source })?;
        let text: Text = toml::from_str(&text).map_err(|error| SettingsError::Text {
            path: shown.clone(),
            problem: error.to_string().trim_end().to_owned(),
        })?;
        Self::of(text).map_err(|problem| SettingsError::Rule { path: shown, problem })
    }

    fn of(text: Text) -> Result<Self, String> {
        let mut plans: BTreeMap<_, _> = [Plan::unlimited(), Plan::free()]
            .map(|plan| (plan.name.clone(), Arc::new(plan)))
            .into();
        for (name, limits) in text.plans {
            if name == UNLIMITED {
                return Err(format!("the plan `{UNLIMITED}` has no limits; choose another name"));
            }
            if name.is_empty() || name.len() > 64 || name.chars().any(char::is_control) {
                return Err(format!(
                    "a plan's name has 1 to 64 characters: `{}`",
                    name.escape_debug()
                ));
            }
            if let (Some(least), Some(most)) = (limits.volume_min_gb, limits.volume_max_gb)
                && least > most
            {
                return Err(format!("plans.{name}: `volume_min_gb` is more than `volume_max_gb`"));
            }
            plans.insert(name.clone(), Arc::new(Plan::new(&name, limits)));
        }
        let default = text.default_plan.as_deref().unwrap_or(UNLIMITED);
        let default = plans.get(default).cloned().ok_or_else(|| {
            format!("`default_plan`: there is no plan `{default}`; there are {}", listed(&plans))
        })?;
        if let Some(prices) = &text.prices {
            prices.check()?;
        }
        Ok(Self { plans, default, prices: text.prices })
    }

    /// `None` names the default.
    pub(crate) fn get(&self, name: Option<&str>) -> Option<Arc<Plan>> {
        name.map_or_else(|| Some(Arc::clone(&self.default)), |name| self.plans.get(name).cloned())
    }

    /// `accounts`: all there are. Of one whose plan the settings do not have, it allows nothing.
    pub(crate) fn plan_of(&self, account: &AccountId, accounts: &[AccountRow]) -> Arc<Plan> {
        let row = accounts.iter().find(|row| row.id == *account);
        let name = row.and_then(|row| row.plan.as_deref());
        self.get(name).unwrap_or_else(|| Arc::new(Plan::unknown(name.unwrap_or_default())))
    }

    /// For a message.
    pub(crate) fn names(&self) -> String {
        listed(&self.plans)
    }
}

impl Prices {
    fn check(&self) -> Result<(), String> {
        let prices = [
            ("volume_gb_month", self.volume_gb_month),
            ("snapshot_gb_month", self.snapshot_gb_month),
            ("vcpu_hour", self.vcpu_hour),
            ("memory_gb_hour", self.memory_gb_hour),
            ("egress_gb", self.egress_gb),
        ];
        match prices.iter().find(|(_, price)| !price.is_finite() || *price < 0.0) {
            Some((name, _)) => Err(format!("prices.{name}: a price is a number, and not negative")),
            None => Ok(()),
        }
    }
}

fn listed(plans: &BTreeMap<String, Arc<Plan>>) -> String {
    plans.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Plans, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Plans::read(file.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn plans_of_the_file_stand_beside_those_that_come_with_the_server() {
        let plans = parse(
            "default_plan = \"team\"\n[plans.team]\nsandboxes = 10\ntotal_gb = 100\nrequests_per_second = 5\n\
             [prices]\ncurrency = \"EUR\"\nvcpu_hour = 0.01\n",
        )
        .unwrap();
        let team = plans.get(None).unwrap();
        assert_eq!((team.name.as_str(), team.limits.sandboxes), ("team", Some(10)));
        assert_eq!(*plans.get(Some("free")).unwrap(), Plan::free());
        assert_eq!(plans.get(Some("nothing")), None);
        assert_eq!(plans.prices.unwrap().vcpu_hour, 0.01);
        assert_eq!(Plans::default().get(None).unwrap().name, "unlimited");
    }

    #[test]
    fn a_file_that_is_wrong_says_where() {
        for (text, said) in [
            ("[plans.team]\nsandboxs = 10\n", "sandboxs"),
            ("[plans.team]\nsandboxes = -1\n", "line 2"),
            ("[plans.team]\nrequests_per_second = 0\n", "nonzero"),
            ("[plans.unlimited]\n", "another name"),
            ("default_plan = \"x\"\n", "`free`, `unlimited`"),
            ("[plans.team]\nvolume_min_gb = 2\nvolume_max_gb = 1\n", "volume_max_gb"),
            ("[prices]\nvcpu_hour = 1\n", "currency"),
            ("[prices]\ncurrency = \"EUR\"\nvcpu_hour = -1.0\n", "prices.vcpu_hour"),
            ("plans", "settings file"),
        ] {
            let problem = parse(text).unwrap_err();
            assert!(problem.contains(said), "{text}: {problem}");
        }
        assert!(Plans::read(Path::new("/nowhere")).unwrap_err().to_string().contains("/nowhere"));
    }
}
