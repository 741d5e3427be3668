# Completion of the plinth command, printed by `plinth completion fish`. Print it again after an upgrade:
#   @place@
function __plinth_words # prints the words of a command; fails if there is no such command
    switch "$argv[1]"
@cases@
        case '*'
            return 1
    end
end
function __plinth_complete
    set -l cur (commandline -ct)
    set -l node
    set -l known (__plinth_words '')
    for word in (commandline -opc)[2..-1]
        string match -qr -- '=|^-' $word; and continue
        set -l inner (string trim -- "$node $word")
        if set -l found (__plinth_words $inner)
            set node $inner
            set known $found
        else if set -l found (__plinth_words $word) # the app of `plinth slurm APP`
            set -a known $found
        end
    end
    if string match -q -- '*=*' $cur
        string match -- "$cur*" $known
    else # up to the next dot or equals sign
        string match -- "$cur*" $known | string replace -r -- '^(.{'(string length -- "$cur")'}[^.=]*[.=]).*' '$1' | uniq
    end
end
# Files only where there are no words.
complete -c plinth -n 'count (__plinth_complete) >/dev/null' -f -a '(__plinth_complete)'
