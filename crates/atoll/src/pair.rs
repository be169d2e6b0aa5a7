//! `NAME=VALUE` arguments.

use std::{collections::BTreeMap, convert::Infallible, str::FromStr};

use crate::failure::Failure;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) name: String,
    pub(crate) value: String,
}

impl FromStr for Pair {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                Ok(Self { name: name.to_owned(), value: value.to_owned() })
            }
            Some(_) | None => Err(Failure::new("write it as NAME=VALUE")),
        }
    }
}

/// A variable of a sandbox or a command: `NAME=VALUE`, or `NAME` for its value here, which then is on no command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Variable {
    Given(Pair),
    Inherited(String),
}

impl FromStr for Variable {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.parse().map_or_else(|_: Failure| Self::Inherited(text.to_owned()), Self::Given))
    }
}

/// `None` when there are none. The last one of a name wins.
pub(crate) fn map(pairs: Vec<Pair>) -> Option<BTreeMap<String, String>> {
    let map: BTreeMap<_, _> = pairs.into_iter().map(|pair| (pair.name, pair.value)).collect();
    (!map.is_empty()).then_some(map)
}

pub(crate) fn environment(
    variables: Vec<Variable>,
) -> Result<Option<BTreeMap<String, String>>, Failure> {
    let pairs = variables.into_iter().map(|variable| match variable {
        Variable::Given(pair) => Ok(pair),
        Variable::Inherited(name) => match std::env::var(&name) {
            Ok(value) => Ok(Pair { name, value }),
            Err(_) => Err(Failure::new(format!("the environment has no variable `{name}`"))
                .hint(format!("give it a value: --env {name}=VALUE"))),
        },
    });
    Ok(map(pairs.collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_equals_sign_divides() {
        let pair: Pair = "a=b=c".parse().unwrap();
        assert_eq!((pair.name.as_str(), pair.value.as_str()), ("a", "b=c"));
        assert!("=x".parse::<Pair>().is_err() && "x".parse::<Pair>().is_err());
        assert_eq!("x=".parse::<Pair>().unwrap().value, "");
    }

    #[test]
    fn a_name_alone_takes_its_value_from_here() {
        let variables = vec!["CARGO_PKG_NAME".parse().unwrap(), "X=1".parse().unwrap()];
        let environment = environment(variables).unwrap().unwrap();
        assert_eq!(environment["CARGO_PKG_NAME"], "atoll");
        assert!(super::environment(vec![Variable::Inherited("ATOLL_NO_SUCH".to_owned())]).is_err());
    }
}
