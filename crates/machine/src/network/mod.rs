//! Network namespaces of machines.
