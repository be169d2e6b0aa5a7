//! From measurements to rows: percentiles, ratios, the table for people and the JSON for programs.

use serde::Serialize;
use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    Lower,
    Higher,
}

/// What the row has to reach to be called good.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    None,
    /// Times the floor, at p50.
    Ratio(f64),
    /// Times the floor, at p50 and at p90.
    RatioAndTail(f64),
    Value(f64),
    /// So much more than the floor, at p50.
    Beyond(f64),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    pub(crate) target: Target,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Samples {
    pub(crate) ours: Vec<f64>,
    pub(crate) floor: Vec<f64>,
}

/// `p90` is what nine of ten measurements were at least as good as: the slow end of times and of rates alike.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figures {
    name: &'static str,
    unit: &'static str,
    n: usize,
    p50: f64,
    p90: f64,
    p99: f64,
    floor_p50: Option<f64>,
    floor_p90: Option<f64>,
    /// `p50 / floor_p50`.
    ratio: Option<f64>,
    #[serde(skip)]
    reached: Option<bool>,
}

impl Figures {
    /// Of at least one measurement of ours.
    pub(crate) fn new(row: &Row, samples: &Samples) -> Self {
        let ours = |share| {
            percentile(&samples.ours, share, row.better).expect("a row is measured at least once")
        };
        let floor = |share| percentile(&samples.floor, share, row.better);
        let (p50, p90) = (ours(0.5), ours(0.9));
        let ratio = floor(0.5).map(|floor| p50 / floor);
        let tail = floor(0.9).map(|floor| p90 / floor);
        let good = |value: f64, target: f64| match row.better {
            Better::Lower => value <= target,
            Better::Higher => value >= target,
        };
        let reached = match row.target {
            Target::None => None,
            Target::Ratio(target) => ratio.map(|ratio| good(ratio, target)),
            Target::RatioAndTail(target) => {
                ratio.zip(tail).map(|(ratio, tail)| good(ratio, target) && good(tail, target))
            }
            Target::Value(target) => Some(good(p50, target)),
            Target::Beyond(target) => floor(0.5).map(|floor| good(p50 - floor, target)),
        };
        Self {
            name: row.name,
            unit: row.unit,
            n: samples.ours.len(),
            p50: rounded(p50),
            p90: rounded(p90),
            p99: rounded(ours(0.99)),
            floor_p50: floor(0.5).map(rounded),
            floor_p90: floor(0.9).map(rounded),
            ratio: ratio.map(rounded),
            reached,
        }
    }

    fn line(&self, row: &Row) -> String {
        let some =
            |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value}"));
        let target = match row.target {
            Target::None => String::new(),
            Target::Ratio(target) => format!("ratio {} {target}", sign(row.better)),
            Target::RatioAndTail(target) => {
                format!("ratio {} {target}, at p90 too", sign(row.better))
            }
            Target::Value(target) => format!("{} {target}", sign(row.better)),
            Target::Beyond(target) => format!("{} floor + {target}", sign(row.better)),
        };
        let verdict = match self.reached {
            Some(true) => "ok",
            Some(false) => "MISSED",
            None => "",
        };
        format!(
            "{:<26} {:<5} {:>4} {:>9} {:>9} {:>9} {:>10} {:>10} {:>7}  {verdict:<6} {target}",
            self.name,
            self.unit,
            self.n,
            self.p50,
            self.p90,
            self.p99,
            some(self.floor_p50),
            some(self.floor_p90),
            some(self.ratio),
        )
        .trim_end()
        .to_owned()
    }
}

pub(crate) fn table(rows: &[(Row, Figures)]) -> String {
    let mut text = format!(
        "{:<26} {:<5} {:>4} {:>9} {:>9} {:>9} {:>10} {:>10} {:>7}\n",
        "row", "unit", "n", "p50", "p90", "p99", "floor p50", "floor p90", "ratio"
    );
    for (row, figures) in rows {
        text += &figures.line(row);
        text.push('\n');
    }
    text
}

/// Of one run.
#[derive(Serialize)]
pub(crate) struct Document<'a> {
    pub(crate) host: &'a Value,
    pub(crate) rows: Vec<&'a Figures>,
}

fn sign(better: Better) -> &'static str {
    match better {
        Better::Lower => "≤",
        Better::Higher => "≥",
    }
}

/// The nearest-rank percentile, counted from the best.
fn percentile(values: &[f64], share: f64, better: Better) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match better {
        Better::Lower => {}
        Better::Higher => sorted.reverse(),
    }
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

fn rounded(value: f64) -> f64 {
    let digits = if value.abs() >= 100.0 { 10.0 } else { 1000.0 };
    (value * digits).round() / digits
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Row =
        Row { name: "time", unit: "ms", better: Better::Lower, target: Target::RatioAndTail(1.5) };
    const RATE: Row =
        Row { name: "rate", unit: "MB/s", better: Better::Higher, target: Target::Ratio(0.7) };

    fn ten() -> Vec<f64> {
        (1..=10).map(f64::from).collect()
    }

    #[test]
    fn percentiles_are_counted_from_the_best() {
        let times = Figures::new(&TIME, &Samples { ours: ten(), floor: ten() });
        assert_eq!((times.p50, times.p90, times.p99), (5.0, 9.0, 10.0));
        let rates = Figures::new(&RATE, &Samples { ours: ten(), floor: ten() });
        assert_eq!((rates.p50, rates.p90, rates.p99), (6.0, 2.0, 1.0));
    }

    #[test]
    fn a_slow_tail_misses_a_target_that_counts_the_tail() {
        let mut ours = ten();
        ours[8] = 100.0;
        ours[9] = 100.0;
        let figures = Figures::new(&TIME, &Samples { ours, floor: ten() });
        assert_eq!((figures.ratio, figures.reached), (Some(1.0), Some(false)));
    }

    #[test]
    fn a_row_without_a_floor_has_no_ratio() {
        let row = Row { target: Target::Value(3.0), ..RATE };
        let figures = Figures::new(&row, &Samples { ours: vec![2.0], floor: vec![] });
        assert_eq!((figures.floor_p50, figures.ratio, figures.reached), (None, None, Some(false)));
        let document = Document { host: &Value::Null, rows: vec![&figures] };
        assert!(serde_json::to_value(document).unwrap()["rows"][0]["ratio"].is_null());
    }
}
