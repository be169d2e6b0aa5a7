//! Points at which the build for tests/faults fails or dies. In every other build nothing is left of them.

/// A step of an operation, named `OPERATION.STEP`. The program may be killed here. With a way from an [`std::io::Error`]
/// to the function's own, it may also fail here: put such a point before what can fail, where the failure would be met.
#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! point {
    ($name:literal $(, $error:expr)? $(,)?) => {};
}

#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! point {
    ($name:literal $(,)?) => {
        // Told to fail where nothing can, it goes on.
        let _ = $crate::reach($name);
    };
    ($name:literal, $error:expr $(,)?) => {
        if let ::std::result::Result::Err(error) = $crate::reach($name) {
            return ::std::result::Result::Err($error(error));
        }
    };
}

#[cfg(feature = "failpoints")]
pub use self::control::{obey, reach};

#[cfg(feature = "failpoints")]
mod control;
