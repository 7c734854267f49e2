#!/bin/sh
# Makes the secrets that docker-compose.yml reads, in deploy/secrets beside this script; those that exist are kept.
#
# The folder is its owner's alone. The files in it are readable, since they are mounted as they are into containers
# that run as another user.
set -eu
folder=$(dirname "$0")/secrets
mkdir -p "$folder"
chmod 700 "$folder"

random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

write() {
    if [ -s "$folder/$1" ]; then
        echo "kept  $folder/$1"
        return
    fi
    printf '%s\n' "$2" > "$folder/$1.partial"
    chmod 444 "$folder/$1.partial"
    mv -f "$folder/$1.partial" "$folder/$1"
    echo "made  $folder/$1"
}

write postgres_password "$(random)"
write database_url "postgresql://coordinator:$(cat "$folder/postgres_password")@postgres:5432/coordinator"
write admin_token "$(random)"
write grafana_password "$(random)"
