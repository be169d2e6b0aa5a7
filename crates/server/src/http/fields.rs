//! The fields of a query, decoded to bytes. `+` is a space, as forms and both published clients write it.

/// Names and values, in their order.
pub(super) fn decoded_fields(text: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let fields = text.split(|&byte| byte == b'&').filter(|field| !field.is_empty());
    fields
        .map(|field| {
            let (name, value) = match field.iter().position(|&byte| byte == b'=') {
                Some(equals) => (&field[..equals], &field[equals + 1..]),
                None => (field, &[][..]),
            };
            (decoded(name), decoded(value))
        })
        .collect()
}

fn decoded(text: &[u8]) -> Vec<u8> {
    let spaced: Vec<u8> = text.iter().map(|&byte| if byte == b'+' { b' ' } else { byte }).collect();
    percent_encoding::percent_decode(&spaced).collect()
}
