#!/bin/sh
# Bring Temporal's two databases to the schema of this release. Done again, it changes nothing.
set -eu
for database in temporal temporal_visibility; do
    case $database in
        temporal) folder=temporal ;;
        *) folder=visibility ;;
    esac
    temporal-sql-tool --plugin "$SQL_PLUGIN" --ep "$SQL_HOST" -p "$SQL_PORT" -u "$SQL_USER" --db "$database" \
        setup-schema -v 0.0
    temporal-sql-tool --plugin "$SQL_PLUGIN" --ep "$SQL_HOST" -p "$SQL_PORT" -u "$SQL_USER" --db "$database" \
        update-schema -d "/etc/temporal/schema/postgresql/v12/$folder/versioned"
done
