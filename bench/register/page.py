def write(out, rows):
    import json
    out.mkdir(parents=True, exist_ok=True)
    (out/"register.json").write_text(json.dumps(rows, indent=1)+"\n")
