//! What a request needs: settings, clock, rows, keys, sandboxes. Nothing is global.

use std::sync::Arc;

use crate::{
    Config,
    buffers::Buffers,
    clock::Clock,
    database::Databases,
    db::Db,
    http::{Connections, Idempotency, Rate},
    keys::Keys,
    metrics::Metrics,
    previews::Previews,
    sandbox::Sandboxes,
    template::Templates,
    volume::Volumes,
};

pub struct App {
    pub config: Config,
    pub clock: Clock,
    pub keys: Keys,
    pub metrics: Arc<Metrics>,
    pub sandboxes: Arc<Sandboxes>,
    pub databases: Arc<Databases>,
    pub volumes: Arc<Volumes>,
    pub templates: Arc<Templates>,
    pub db: Db,
    pub previews: Previews,
    pub buffers: Buffers,
    pub rate: Rate,
    pub idempotency: Idempotency,
    pub connections: Arc<Connections>,
}
