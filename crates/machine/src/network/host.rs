//! What instances have on this host, told by its names alone: for a sweep of those whose server is gone for good.

use std::{collections::BTreeMap, fs, io};

use super::{
    Error,
    address::Instance,
    command::{self, Program},
    namespace::NAMES,
};

/// Names of one instance's things.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct OnHost {
    pub namespaces: Vec<String>,
    pub links: Vec<String>,
    pub tables: Vec<String>,
}

/// By the instance's number.
///
/// # Errors
/// The host cannot be asked, for example because there is no `nft`.
pub async fn instances_on_host() -> Result<BTreeMap<u16, OnHost>, Error> {
    let mut found: BTreeMap<u16, OnHost> = BTreeMap::new();
    for name in namespaces()? {
        if let Some(instance) = Instance::of_name(&name, "atoll-", '-')
            && instance.slot_of_namespace(&name).is_some()
        {
            found.entry(instance.number()).or_default().namespaces.push(name);
        }
    }
    for name in links()? {
        if let Some(instance) = Instance::of_name(&name, "at", '.')
            && instance.slot_of_link(&name).is_some()
        {
            found.entry(instance.number()).or_default().links.push(name);
        } else if let Some(instance) = Instance::of_name(&name, "atdoor", '\0') {
            found.entry(instance.number()).or_default().links.push(name);
        }
    }
    for line in command::run(Program::NftListTables, "").await?.lines() {
        if let Some(table) = line.strip_prefix("table inet ")
            && let Some(instance) = Instance::of_name(table.trim(), "atoll_", '\0')
        {
            found.entry(instance.number()).or_default().tables.push(table.trim().to_owned());
        }
    }
    Ok(found)
}

fn namespaces() -> Result<Vec<String>, Error> {
    let failed = |source: io::Error| Error::kernel("list", NAMES, source);
    match fs::read_dir(NAMES) {
        Ok(entries) => entries
            .map(|entry| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned()))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(error)),
    }
}

fn links() -> Result<Vec<String>, Error> {
    let interfaces = nix::net::if_::if_nameindex()
        .map_err(|errno| Error::kernel("list", "the network interfaces", errno.into()))?;
    Ok(interfaces
        .iter()
        .filter_map(|interface| interface.name().to_str().ok().map(str::to_owned))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_only_from_names_that_we_would_write() {
        let number =
            |name: &str, prefix, end| Instance::of_name(name, prefix, end).map(Instance::number);
        assert_eq!(number("atoll-7-12", "atoll-", '-'), Some(7));
        assert_eq!(number("at1023.0", "at", '.'), Some(1023));
        assert_eq!(number("atoll_0", "atoll_", '\0'), Some(0));
        for name in ["atoll-07-1", "atoll-1024-1", "atoll-+7-1", "atoll--1", "other-7-1"] {
            assert_eq!(number(name, "atoll-", '-'), None, "{name}");
        }
    }
}
