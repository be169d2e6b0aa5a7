//! What the fields of a create may say, whatever is there.

use std::collections::BTreeMap;

use store::template::Template;

use crate::Error;

pub(super) const MOST_CPUS: u32 = 32;
pub(super) const MEMORY_MIB: std::ops::RangeInclusive<u64> = 256..=131_072;
pub(crate) const DISK_MIB: std::ops::RangeInclusive<u64> = 1024..=1_048_576;
/// Memory sizes in between would each want a bake of their own.
const MEMORY_STEP_MIB: u64 = 128;
const LONGEST_TTL: i64 = 10 * 365 * 86_400;
const MOST_METADATA: usize = 64;
const LONGEST_TEXT: usize = 4096;
const MOST_ENVIRONMENT_BYTES: usize = 256 * 1024;

/// What the time to live is to be; the outer `None` says nothing.
pub(crate) fn ttl_of(
    ttl_seconds: Option<i64>,
    persistent: Option<bool>,
) -> Result<Option<Option<u64>>, Error> {
    match (ttl_seconds, persistent) {
        (Some(_), Some(true)) => Err(Error::invalid(
            "`ttl_seconds` and `persistent: true` exclude each other; leave one of them out",
        )),
        (None, Some(true)) => Ok(Some(None)),
        (Some(ttl), Some(false) | None) => match u64::try_from(ttl) {
            Ok(seconds) if ttl > 0 && ttl <= LONGEST_TTL => Ok(Some(Some(seconds))),
            Ok(_) | Err(_) => Err(Error::invalid(format!(
                "`ttl_seconds` must be between 1 and {LONGEST_TTL}; use `persistent: true` for a sandbox without a time to live"
            ))),
        },
        (None, Some(false) | None) => Ok(None),
    }
}

pub(crate) fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), Error> {
    if metadata.len() > MOST_METADATA {
        return Err(Error::invalid(format!("`metadata` may have at most {MOST_METADATA} entries")));
    }
    match metadata
        .iter()
        .find(|(key, value)| key.is_empty() || key.len() > 256 || value.len() > LONGEST_TEXT)
    {
        Some((key, _)) => Err(Error::invalid(format!(
            "`metadata.{}`: a key has 1 to 256 bytes, a value at most {LONGEST_TEXT}",
            key.chars().take(40).collect::<String>()
        ))),
        None => Ok(()),
    }
}

/// Shared by creates and commands.
pub(crate) fn check_environment(environment: &BTreeMap<String, String>) -> Result<(), Error> {
    let total: usize = environment.iter().map(|(key, value)| key.len() + value.len() + 2).sum();
    if total > MOST_ENVIRONMENT_BYTES {
        return Err(Error::invalid(format!(
            "`env` may have at most {MOST_ENVIRONMENT_BYTES} bytes in all; put larger values into a file"
        )));
    }
    for (key, value) in environment {
        if key.is_empty() || key.contains(['=', '\0']) {
            return Err(Error::invalid("`env`: a name must not be empty nor hold `=` or NUL"));
        }
        if value.contains('\0') {
            return Err(Error::invalid(format!("`env.{key}` must not hold NUL")));
        }
    }
    Ok(())
}

pub(super) fn pick<T: Copy + PartialOrd + std::fmt::Display>(
    field: &str,
    unit: &str,
    asked: Option<T>,
    default: T,
    range: &std::ops::RangeInclusive<T>,
) -> Result<T, Error> {
    match asked {
        None => Ok(default),
        Some(value) if range.contains(&value) => Ok(value),
        Some(_) => Err(Error::invalid(format!(
            "`{field}` must be between {} and {}{unit}",
            range.start(),
            range.end()
        ))),
    }
}

/// What fields are called that both dialects have.
pub(super) struct Fields {
    pub(super) template: &'static str,
    pub(super) disk: &'static str,
    /// What a disk is counted in.
    pub(super) disk_unit_mb: u64,
}

pub(super) const SANDBOX_FIELDS: Fields =
    Fields { template: "template", disk: "disk_mb", disk_unit_mb: 1 };
pub(super) const MACHINE_FIELDS: Fields =
    Fields { template: "stack", disk: "rootfs_size_gb", disk_unit_mb: 1024 };

/// A disk smaller than the template's is baked from a copy of it that was made smaller.
pub(super) async fn check_fits(
    template: &Template,
    disk_mb: u64,
    fields: &Fields,
) -> Result<(), Error> {
    let rootfs = template.rootfs.clone();
    let least = tokio::task::spawn_blocking(move || store::ext4::minimum_mb(&rootfs))
        .await
        .map_err(Error::internal)?;
    match least.map_err(Error::internal)? {
        least if disk_mb < least => {
            let (name, least) = (fields.disk, least.div_ceil(fields.disk_unit_mb));
            Err(Error::invalid(format!("`{name}` must be at least {least} for this template")))
        }
        _ => Ok(()),
    }
}

/// Sizes of a machine, within bounds.
pub(super) struct MachineSize {
    pub(super) vcpus: u32,
    pub(super) memory_mb: u64,
    pub(super) disk_mb: u64,
}

pub(super) fn pick_size(vcpus: u32, memory_mb: u64, rootfs_gb: u64) -> Result<MachineSize, Error> {
    let gigabytes = DISK_MIB.start() >> 10..=DISK_MIB.end() >> 10;
    Ok(MachineSize {
        vcpus: pick("vcpus", "", Some(vcpus), vcpus, &(1..=MOST_CPUS))?,
        memory_mb: pick_memory(Some(memory_mb), memory_mb)?,
        disk_mb: pick("rootfs_size_gb", " (GiB)", Some(rootfs_gb), rootfs_gb, &gigabytes)? << 10,
    })
}

pub(super) fn pick_memory(asked: Option<u64>, default: u64) -> Result<u64, Error> {
    let memory_mb = pick("memory_mb", " (MiB)", asked, default, &MEMORY_MIB)?;
    if memory_mb % MEMORY_STEP_MIB != 0 {
        return Err(Error::invalid(format!("`memory_mb` must be a multiple of {MEMORY_STEP_MIB}")));
    }
    Ok(memory_mb)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_to_live_of_nothing_or_less_is_refused_with_a_reason() {
        for ttl in [0, -1, i64::MIN, LONGEST_TTL + 1] {
            assert!(ttl_of(Some(ttl), None).unwrap_err().message.contains("ttl_seconds"));
        }
        assert_eq!(ttl_of(Some(1), None).unwrap(), Some(Some(1)));
        assert_eq!(ttl_of(None, Some(true)).unwrap(), Some(None));
        assert_eq!(ttl_of(None, None).unwrap(), None);
        assert!(ttl_of(Some(5), Some(true)).is_err());
    }

    #[test]
    fn an_environment_that_no_process_could_have_is_refused() {
        let env = |key: &str, value: &str| {
            check_environment(&BTreeMap::from([(key.to_owned(), value.to_owned())]))
        };
        assert!(env("", "x").is_err());
        assert!(env("A=B", "x").is_err());
        assert!(env("A", "x\0").is_err());
        assert!(env("A", &"x".repeat(MOST_ENVIRONMENT_BYTES)).is_err());
        assert!(env("A", "quotes ' \" \n $HOME é").is_ok());
    }
}
