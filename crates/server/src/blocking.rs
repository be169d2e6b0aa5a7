//! Files and tools block; they are waited for beside the threads that serve requests.

use crate::Error;

pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> store::Result<T> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(Error::internal)?.map_err(Error::from_store)
}
