#!/bin/sh
# Make the namespace, and keep histories as long as runs need them. Workers register their search attributes themselves.
set -eu
tries=0
until temporal operator cluster health --address "$TEMPORAL_ADDRESS" >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -ge 60 ]; then
        echo "Temporal at $TEMPORAL_ADDRESS does not become healthy; see its log." >&2
        exit 1
    fi
    sleep 2
done
if temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" --address "$TEMPORAL_ADDRESS" >/dev/null 2>&1; then
    temporal operator namespace update --namespace "$TEMPORAL_NAMESPACE" --address "$TEMPORAL_ADDRESS" --retention "$RETENTION"
else
    temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --address "$TEMPORAL_ADDRESS" --retention "$RETENTION"
fi
