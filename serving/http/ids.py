"""What metadata tells of the ids of a table."""

from typing import Any

from tableside.loader.stored import StoredIds, StoredTable


def describe_ids(table: StoredTable) -> dict[str, Any]:
    """Which ids a table has, and what becomes of others, as JSON.

    ids: "row", where they are [first_id, first_id + id_count), or "raw", any int64. id_count: ids with a row of their own.
    missing: the policy for others, as model.toml has it. backfilled: ids whose row came from an older version.
    """
    ids = table.ids or StoredIds(table.rows)
    is_raw = ids.index is not None
    found: dict[str, Any] = {"ids": "raw" if is_raw else "row", "id_count": ids.count}
    if not is_raw:
        found["first_id"] = ids.first
    return {**found, "missing": ids.missing, "backfilled": ids.backfilled}
