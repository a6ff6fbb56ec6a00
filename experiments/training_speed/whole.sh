# Whole runs of the shipped model's experts on one GPU, start to end: as written, replayed, two at a time.
#     bash experiments/training_speed/whole.sh FOLDER
set -u
folder=$1
mkdir -p "$folder"
measure() {
    local name=$1 begun code seconds
    shift
    begun=$SECONDS
    python3 -m mergekit_lab +experiment=quickstart stage=finetune joint=false training.steps=200 progress=false \
        store.root="$folder/store_$name" "$@" > "$folder/$name.log" 2>&1
    code=$?
    seconds=$((SECONDS - begun))
    echo "{\"name\": \"$name\", \"exit\": $code, \"seconds\": $seconds}" | tee -a "$folder/whole.jsonl"
    rm -rf "$folder/store_$name"
}
measure written training.capture=false
measure replayed
measure two_at_a_time "device=[cuda:0,cuda:0]"
