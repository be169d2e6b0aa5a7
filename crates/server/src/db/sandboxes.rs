//! Rows of sandboxes.

use std::collections::BTreeMap;

use api::{AccountId, DatabaseId, NetworkPolicy, SandboxId, SnapshotId, TemplateName, VolumeId};
use machine::network::Traffic;
use serde::Serialize;
use sqlx::{Row as _, any::AnyRow};

use super::{Db, VolumeRow, quotas::admit, signed, unsigned, volumes};
use crate::{
    Error,
    account::{Amounts, Plan},
    sandbox::{State, Target},
};

/// Everything that is remembered of a sandbox. Times are milliseconds since 1970.
#[derive(Clone)]
pub(crate) struct SandboxRow {
    pub(crate) id: SandboxId,
    pub(crate) account: AccountId,
    pub(crate) template: TemplateName,
    /// The bake its machine was restored from; decides whether a running one can be found again.
    pub(crate) bake: String,
    pub(crate) from_snapshot: Option<SnapshotId>,
    pub(crate) cpu: u32,
    pub(crate) memory_mb: u64,
    pub(crate) disk_mb: u64,
    pub(crate) state: State,
    pub(crate) target: Target,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) created_at: i64,
    pub(crate) ttl_seconds: Option<u64>,
    /// A steady time; see [`crate::clock`].
    pub(crate) expires_at: Option<i64>,
    /// Milliseconds that were left when the time to live began to stand still.
    pub(crate) ttl_left_ms: Option<i64>,
    /// Unused for so long, it hibernates.
    pub(crate) idle_seconds: Option<u64>,
    /// Which of the host's slots (namespace, uid, directory) its machine has.
    pub(crate) slot: Option<u16>,
    pub(crate) boot_ms: u64,
    pub(crate) error: Option<String>,
    pub(crate) network: NetworkPolicy,
    /// Over the networks that it no longer has.
    pub(crate) past_traffic: Traffic,
    /// For people.
    pub(crate) name: Option<String>,
    /// Its root disk is a volume, which may have been detached.
    pub(crate) durable: bool,
    /// Its root volume stays when it goes.
    pub(crate) keeps_root: bool,
    /// Its guest was booted, and not restored.
    pub(crate) cold_boot: bool,
    /// It is a database's: neither listed nor deleted by itself.
    pub(crate) managed: bool,
    /// Whose URLs its commands are given.
    pub(crate) databases: Vec<DatabaseId>,
}

const COLUMNS: &str = "id, account, template, bake, cpu, memory_mb, disk_mb, state, target, metadata, environment, \
     created_at, ttl_seconds, expires_at, slot, boot_ms, error, network, sent_bytes, received_bytes, from_snapshot, \
     ttl_left_ms, idle_seconds, name, durable, keeps_root, cold_boot, managed, databases";

impl SandboxRow {
    /// What it takes of its account's.
    pub(crate) fn amounts(&self) -> Amounts {
        Amounts {
            sandboxes: 1,
            vcpus: self.cpu.into(),
            memory_mb: self.memory_mb,
            disk_bytes: self.disk_mb << 20,
            ..Amounts::default()
        }
    }
}

impl Db {
    /// With its root volume, where that is made for it.
    ///
    /// # Errors
    /// The plan does not allow one more.
    pub(crate) async fn insert_sandbox(
        &self,
        row: &SandboxRow,
        root: Option<&VolumeRow>,
        plan: &Plan,
    ) -> Result<(), Error> {
        let mut transaction = self.pool().begin().await?;
        admit(&mut transaction, &row.account, plan, &row.amounts(), Some(&row.id)).await?;
        if let Some(root) = root {
            volumes::insert_root(&mut transaction, root, &row.id).await?;
            self.meter_volume(&mut transaction, &root.id).await?;
        }
        sqlx::query(&format!(
            "INSERT INTO sandboxes ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29)"
        ))
        .bind(row.id.to_string())
        .bind(row.account.as_str())
        .bind(row.template.as_str())
        .bind(&row.bake)
        .bind(i64::from(row.cpu))
        .bind(signed(row.memory_mb)?)
        .bind(signed(row.disk_mb)?)
        .bind(row.state.name())
        .bind(row.target.name())
        .bind(json(&row.metadata))
        .bind(json(&row.environment))
        .bind(row.created_at)
        .bind(row.ttl_seconds.map(signed).transpose()?)
        .bind(row.expires_at)
        .bind(row.slot.map(i64::from))
        .bind(signed(row.boot_ms)?)
        .bind(&row.error)
        .bind(json(&row.network))
        .bind(signed(row.past_traffic.sent_bytes)?)
        .bind(signed(row.past_traffic.received_bytes)?)
        .bind(row.from_snapshot.map(|id| id.to_string()))
        .bind(row.ttl_left_ms)
        .bind(row.idle_seconds.map(signed).transpose()?)
        .bind(&row.name)
        .bind(i64::from(row.durable))
        .bind(i64::from(row.keeps_root))
        .bind(i64::from(row.cold_boot))
        .bind(i64::from(row.managed))
        .bind(json(&row.databases))
        .execute(&mut *transaction)
        .await?;
        self.meter_sandbox(&mut transaction, &row.id).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Writes what changes in a sandbox's life.
    pub(crate) async fn update_sandbox(&self, row: &SandboxRow) -> Result<(), Error> {
        let mut transaction = self.pool().begin().await?;
        sqlx::query(
            "UPDATE sandboxes SET state = $2, target = $3, metadata = $4, ttl_seconds = $5, expires_at = $6, slot = $7, \
             boot_ms = $8, error = $9, network = $10, sent_bytes = $11, received_bytes = $12, ttl_left_ms = $13, \
             idle_seconds = $14, disk_mb = $15, keeps_root = $16, cold_boot = $17 WHERE id = $1",
        )
        .bind(row.id.to_string())
        .bind(row.state.name())
        .bind(row.target.name())
        .bind(json(&row.metadata))
        .bind(row.ttl_seconds.map(signed).transpose()?)
        .bind(row.expires_at)
        .bind(row.slot.map(i64::from))
        .bind(signed(row.boot_ms)?)
        .bind(&row.error)
        .bind(json(&row.network))
        .bind(signed(row.past_traffic.sent_bytes)?)
        .bind(signed(row.past_traffic.received_bytes)?)
        .bind(row.ttl_left_ms)
        .bind(row.idle_seconds.map(signed).transpose()?)
        .bind(signed(row.disk_mb)?)
        .bind(i64::from(row.keeps_root))
        .bind(i64::from(row.cold_boot))
        .execute(&mut *transaction)
        .await?;
        self.meter_sandbox(&mut transaction, &row.id).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// With its hold on volumes, and with `root`, the row of a volume that goes with it. Idempotent.
    pub(crate) async fn delete_sandbox(
        &self,
        id: &SandboxId,
        root: Option<&VolumeId>,
    ) -> Result<(), Error> {
        fault::point!("delete.row_deleting", Error::internal);
        let mut transaction = self.pool().begin().await?;
        let of_sandbox = [
            "DELETE FROM attachments WHERE sandbox = $1",
            "DELETE FROM preview_tokens WHERE sandbox = $1",
            "DELETE FROM exposed_ports WHERE sandbox = $1",
            "DELETE FROM sandboxes WHERE id = $1",
        ];
        for statement in of_sandbox {
            sqlx::query(statement).bind(id.to_string()).execute(&mut *transaction).await?;
        }
        if let Some(root) = root {
            sqlx::query("DELETE FROM volumes WHERE id = $1")
                .bind(root.to_string())
                .execute(&mut *transaction)
                .await?;
            self.meter_volume(&mut transaction, root).await?;
        }
        self.meter_sandbox(&mut transaction, id).await?;
        transaction.commit().await?;
        Ok(())
    }

    pub(crate) async fn all_sandboxes(&self) -> Result<Vec<SandboxRow>, Error> {
        let rows =
            sqlx::query(&format!("SELECT {COLUMNS} FROM sandboxes")).fetch_all(self.pool()).await?;
        rows.iter().map(from_row).collect()
    }
}

fn from_row(row: &AnyRow) -> Result<SandboxRow, Error> {
    let text = |column: &str| row.try_get::<String, _>(column);
    let number = |column: &str| row.try_get::<i64, _>(column);
    let maybe = |column: &str| row.try_get::<Option<i64>, _>(column);
    let unread =
        |what: &str| Error::internal(format!("a row of sandboxes has an unreadable {what}"));
    Ok(SandboxRow {
        id: text("id")?.parse().map_err(|_| unread("id"))?,
        account: text("account")?.parse().map_err(|_| unread("account"))?,
        template: text("template")?.parse().map_err(|_| unread("template"))?,
        bake: text("bake")?,
        cpu: unsigned(number("cpu")?)?,
        memory_mb: unsigned(number("memory_mb")?)?,
        disk_mb: unsigned(number("disk_mb")?)?,
        state: State::from_name(&text("state")?).ok_or_else(|| unread("state"))?,
        target: Target::from_name(&text("target")?).ok_or_else(|| unread("target"))?,
        metadata: serde_json::from_str(&text("metadata")?).map_err(|_| unread("metadata"))?,
        environment: serde_json::from_str(&text("environment")?)
            .map_err(|_| unread("environment"))?,
        created_at: number("created_at")?,
        ttl_seconds: maybe("ttl_seconds")?.map(unsigned).transpose()?,
        expires_at: maybe("expires_at")?,
        slot: maybe("slot")?.and_then(|slot| u16::try_from(slot).ok()),
        boot_ms: unsigned(number("boot_ms")?)?,
        error: row.try_get("error")?,
        network: serde_json::from_str(&text("network")?).map_err(|_| unread("network"))?,
        past_traffic: Traffic {
            sent_bytes: unsigned(number("sent_bytes")?)?,
            received_bytes: unsigned(number("received_bytes")?)?,
        },
        from_snapshot: row
            .try_get::<Option<String>, _>("from_snapshot")?
            .map(|id| id.parse().map_err(|_| unread("snapshot")))
            .transpose()?,
        ttl_left_ms: maybe("ttl_left_ms")?,
        idle_seconds: maybe("idle_seconds")?.map(unsigned).transpose()?,
        name: row.try_get("name")?,
        durable: number("durable")? != 0,
        keeps_root: number("keeps_root")? != 0,
        cold_boot: number("cold_boot")? != 0,
        managed: number("managed")? != 0,
        databases: serde_json::from_str(&text("databases")?).map_err(|_| unread("databases"))?,
    })
}

pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings, numbers and maps of them are JSON")
}
